"""Families of models whose training was tested, and what no proof covers of the model of a run.

docs/models.md is written from the list. Its tests have a tiny model of each: tests/fixtures/families.py. What the runs
with published configs cover is in proofs.json, which `make docs` writes from their records.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig


@dataclass(frozen=True, slots=True)
class Family:
    """A family of decoders in transformers."""

    title: str
    model_types: tuple[str, ...]
    """`model_type` of the text config."""
    layers: str = ""
    """Kinds of layers beside attention and dense layers."""
    is_recurrent: bool = False
    """Layers carry a state: the CPU engine caches no prefixes, and the trainer shares none."""
    has_experts: bool = False
    replays_routes: bool = False
    """The experts that the engine chose were replayed in the trainer (`correction.routing_replay=engine`)."""
    merges_adapters: bool = False
    """vLLM does not apply LoRA to every layer that a run adapts by default, because it computes with products of their
    weights, or this was not tested."""


FAMILIES = (
    Family("Qwen2, Qwen2.5", ("qwen2",)),
    Family("Qwen3", ("qwen3",)),
    Family("Llama 3", ("llama",)),
    Family("Gemma 2", ("gemma2",), "softcaps, sliding window"),
    Family("Gemma 3, text", ("gemma3_text",), "sliding window"),
    Family("Mistral", ("mistral",), "sliding window"),
    Family("Phi-3", ("phi3",), "joined projections"),
    Family("Qwen2 MoE", ("qwen2_moe",), "experts, a shared expert", has_experts=True, replays_routes=True),
    Family("Qwen3 MoE", ("qwen3_moe",), "experts", has_experts=True, replays_routes=True),
    Family("Mixtral", ("mixtral",), "experts", has_experts=True, replays_routes=True),
    Family("OLMoE", ("olmoe",), "experts", has_experts=True, replays_routes=True),
    Family(
        "GLM-4 MoE", ("glm4_moe",), "experts, a shared expert, correction bias", has_experts=True, replays_routes=True
    ),
    Family("Granite MoE", ("granitemoe",), "stacked experts", has_experts=True, replays_routes=True),
    Family(
        "gpt-oss",
        ("gpt_oss",),
        "stacked experts, attention sinks, sliding window",
        has_experts=True,
        replays_routes=True,
    ),
    Family("DeepSeek-V2", ("deepseek_v2",), "latent attention, experts", has_experts=True, merges_adapters=True),
    Family(
        "DeepSeek-V3",
        ("deepseek_v3",),
        "latent attention, experts, correction bias",
        has_experts=True,
        merges_adapters=True,
    ),
    Family("MiniMax-M2", ("minimax_m2",), "experts, correction bias", has_experts=True),
    Family(
        "Llama 4, text", ("llama4_text",), "experts, a shared expert, chunks", has_experts=True, merges_adapters=True
    ),
    Family("Falcon-H1", ("falcon_h1",), "Mamba-2 beside attention", is_recurrent=True),
    Family("Nemotron-H", ("nemotron_h",), "Mamba-2", is_recurrent=True),
    Family(
        "Granite 4 hybrid",
        ("granitemoehybrid",),
        "Mamba-2, experts",
        is_recurrent=True,
        has_experts=True,
        replays_routes=True,
    ),
    Family(
        "Qwen3-Next",
        ("qwen3_next",),
        "gated delta net, experts",
        is_recurrent=True,
        has_experts=True,
        replays_routes=True,
    ),
    Family("Qwen3.5", ("qwen3_5_text",), "gated delta net", is_recurrent=True, merges_adapters=True),
    Family(
        "Qwen3.5 MoE",
        ("qwen3_5_moe_text",),
        "gated delta net, experts",
        is_recurrent=True,
        has_experts=True,
        merges_adapters=True,
    ),
    Family("LFM2", ("lfm2",), "short convolution", is_recurrent=True),
    Family(
        "LFM2 MoE",
        ("lfm2_moe",),
        "short convolution, experts",
        is_recurrent=True,
        has_experts=True,
        replays_routes=True,
    ),
)

PROOFS = Path(__file__).with_name("proofs.json")
"""Values of settings in the proofs, by model type and setting."""
WITHOUT_EFFECT = re.compile(
    r"^_|token_id$|dropout|pdrop|^use_cache|^cache_implementation|init|aux_loss|z_loss|^mtp_|nextn|^auto_map"
    r"|^output_router|^num_logits|^pretraining_tp|^quantization_config"
)
"""Settings that do not change the log-probabilities of a trained model: names of tokens, caches, initial values, noise,
which the trainer turns off, losses that it does not have, layers that predict further tokens, quantization (QLoRA)."""
SHOWN = 5
"""Settings in a sentence at most."""
AT_SYNC = "; by the first weight sync: names and values of the weights (the canary)"
UNCHECKED = "the gradient of every parameter, adapters, engine and saved model against transformers after updates"


def unproven(config: PreTrainedConfig, passed: Sequence[str], *, has_sync: bool) -> str | None:
    """Return a sentence about a model that the proofs do not cover: what its run has checked, and what nothing has.

    passed: checks of the start that ran. None if a proof of its type has all its settings.
    """
    text = config.get_text_config()
    proven = json.loads(PROOFS.read_text(encoding="utf-8")).get(text.model_type)
    checks = f"Passed on this model: {', '.join(passed)}{AT_SYNC if has_sync else ''}"
    if proven is None:
        is_tested = any(text.model_type in family.model_types for family in FAMILIES)
        only = ", only tests of a tiny model (docs/models.md)" if is_tested else " (docs/models.md)"
        return (
            f"model type {text.model_type} has no proof with a published config{only}. {checks}; no proof: {UNCHECKED}"
        )
    others = [f"{name}={value}" for name, value in settings(config) if value not in proven.get(name, ())]
    if not others:
        return None
    listing = ", ".join(others[:SHOWN]) + (f" and {len(others) - SHOWN} more" if len(others) > SHOWN else "")
    return f"no proof of model type {text.model_type} (docs/models.md) has {listing}. {checks}"


def settings(config: PreTrainedConfig) -> Iterator[tuple[str, str]]:
    """Yield the settings of a text model that change what it computes, each with its kind of value.

    A number is 0, 1 or `n`, a count (`num_…`) 0 or `n`: whether there is a window or scale matters, its size does not.
    """
    common = PreTrainedConfig().to_dict()
    text = config.get_text_config().to_dict()
    yield from _kinds({name: value for name, value in text.items() if name not in common})


def _kinds(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if WITHOUT_EFFECT.search(str(name)):
            continue
        if isinstance(value, Mapping):
            yield from _kinds(value, f"{prefix}{name}.")
            continue
        for part in value if isinstance(value, list | tuple) else [value]:
            kind = _kind(part)
            yield f"{prefix}{name}", "n" if kind == "1" and str(name).startswith("num_") else kind


def _kind(value: Any) -> str:
    is_many = isinstance(value, int | float) and not isinstance(value, bool) and value not in (0, 1)
    return "n" if is_many else json.dumps(int(value) if isinstance(value, float) else value, default=str).strip('"')
