"""Save the text model of a checkpoint with a vision tower as a model of its own, which Lockstep trains.

    python scripts/save_text_model.py <directory or hub id> <directory to write>

The whole checkpoint is loaded on the CPU, in its own dtype. Tokenizer and generation config are saved, too.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)

from lockstep.trainer.model.decoder import OF_TEXT


def text_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return the text model, with the weights of a model for images and text."""
    config = _text_config(model.config)
    text = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    text.get_decoder().load_state_dict(model.get_decoder().state_dict())
    text.get_output_embeddings().load_state_dict(model.get_output_embeddings().state_dict())
    text.generation_config = model.generation_config
    return text


def _text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    text = config.get_text_config()
    if text.model_type in OF_TEXT:
        values = {name: value for name, value in text.to_dict().items() if name != "model_type"}
        rope = {name: value for name, value in values["rope_parameters"].items() if "mrope" not in (name[:5], value)}
        text = CONFIG_MAPPING[OF_TEXT[text.model_type]].from_dict(values | {"rope_parameters": rope})
    text.tie_word_embeddings = config.tie_word_embeddings
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory or hub id")
    parser.add_argument("directory", type=Path, help="where to save the text model")
    arguments = parser.parse_args()
    model = AutoModelForImageTextToText.from_pretrained(arguments.model, dtype="auto")
    text_model(model).save_pretrained(arguments.directory)
    AutoTokenizer.from_pretrained(arguments.model).save_pretrained(arguments.directory)
    print(f"model.path={arguments.directory}")


if __name__ == "__main__":
    main()
