"""Families of models whose training was tested, and what a run of another one has not been tested for.

docs/models.md is written from this list. Its tests have a tiny model of each: tests/fixtures/families.py.
"""

from __future__ import annotations

from dataclasses import dataclass


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

CHECKED_AT_START = "the head, and the isolation of rows in a pack"
CHECKED_AT_SYNC = "names and values of the weights (the canary)"
UNCHECKED = "the gradient of every parameter, adapters"


def untested(model_type: str) -> str | None:
    """Return a sentence about a model of no tested family: what its run checks, and what nothing has checked."""
    if any(model_type in family.model_types for family in FAMILIES):
        return None
    return (
        f"model type {model_type} is not among the families of docs/models.md. Checked at the start: "
        f"{CHECKED_AT_START}; by the first weight sync: {CHECKED_AT_SYNC}; by no test: {UNCHECKED}"
    )
