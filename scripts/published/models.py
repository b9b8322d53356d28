"""Small models with the configs of public checkpoints and random weights.

A line of configs.jsonl has the family, the checkpoint, where its config was read, the config as published, and
`reduced`, whose values replace published ones: sizes, lengths in proportion to the context, ids of tokens. All else is
as published: scales, biases, norms, kinds of layers, routers, rotary scaling.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lockstep.rollout.models.stored_model import read_config
from lockstep.trainer.model.decoder import OF_TEXT
from lockstep.trainer.model.text_model import text_model

FILE = Path(__file__).with_name("configs.jsonl")
TRAINED_AS_THEY_ARE = ("qwen3_5", "qwen3_5_moe")
"""Model types with a vision tower that the trainer leaves out."""
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Config of a public checkpoint."""

    family: str
    checkpoint: str
    source: str
    sure: bool
    """False if part of the config was not seen."""
    published: Mapping[str, Any]
    reduced: Mapping[str, Any]
    drop: tuple[str, ...] = ()
    """Published settings that the installed transformers refuses."""

    @property
    def config(self) -> dict[str, Any]:
        """Return the small config.json."""
        settings = _merged(self.published, self.reduced)
        small = json.dumps({name: value for name, value in settings.items() if name not in self.drop})
        return json.loads(small.replace('"Infinity"', "Infinity"))


def published_models() -> dict[str, Published]:
    """Return all by family, in the order of the file."""
    lines = FILE.read_text(encoding="utf-8").splitlines()
    return {one.family: one for one in (Published(**json.loads(line)) for line in lines)}


def save_model(one: Published, directory: Path) -> Path:
    """Write a model of the published class and a tokenizer to `directory` and return it.

    Of a class with a vision tower it is the text model, as `scripts/save_text_model.py` saves it; but Qwen3.5, whose
    checkpoints are trained as they are.
    """
    config = CONFIG_MAPPING[one.config["model_type"]].from_dict(one.config)
    model_class = getattr(transformers, one.config["architectures"][0], None)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config) if model_class is None else model_class(config)
    model = model.float().eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if "bias" in name or "alpha" in name:  # which are 0 or alike before training
                tensor += 0.1 * torch.randn(tensor.shape)
            if "_a_proj" in name:  # the ε of the norm after it matters
                tensor *= 0.01
    text = model.config.get_text_config().model_type
    has_tower = "vision_config" in one.config and one.config["model_type"] not in TRAINED_AS_THEY_ARE
    if has_tower and (text in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or text in OF_TEXT):
        model = text_model(model)
    model.save_pretrained(directory)
    _tokenizer().save_pretrained(directory)
    return directory


def plain_model(path: Path, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load a model in transformers' own eager mode.

    Time steps of Mamba-2 layers have no limits, as in the engine: transformers limits Nemotron-H's from below by
    `time_step_min`, which is for initial values.
    """
    config = read_config(path, setting="model.path", trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=dtype, attn_implementation="eager").eval()
    for layer in model.modules():
        if "time_step_limit" in vars(layer):
            layer.time_step_limit = (0.0, float("inf"))
    return model


def _tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with one id per byte and an end of sequence, 0."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<eos>": 0} | {letter: 1 + index for index, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _merged(published: Mapping[str, Any], reduced: Mapping[str, Any]) -> dict[str, Any]:
    return dict(published) | {
        name: _merged(published[name], value)
        if isinstance(value, Mapping) and isinstance(published.get(name), Mapping)
        else value
        for name, value in reduced.items()
    }
