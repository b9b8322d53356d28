"""The text model of a checkpoint with a vision tower (`lockstep save-text-model`)."""

from __future__ import annotations

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


def save_text_model(checkpoint: str, directory: Path) -> None:
    """Save the text model of a checkpoint, a directory or hub id, with its tokenizer."""
    model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype="auto")
    text_model(model).save_pretrained(directory)
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(directory)


def text_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return the text model, with the weights of a model for images and text."""
    config = _text_config(model.config)
    text = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    text.get_decoder().load_state_dict(model.get_decoder().state_dict())
    head = model.get_output_embeddings()
    assert head is not None, "models that write text have a head"
    text.get_output_embeddings().load_state_dict(head.state_dict())
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
