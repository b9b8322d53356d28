"""Landmarks: values that engine and trainer both compute, by the name of the trainer's module.

A landmark is the output of a module, its input (what no module computes, such as a product or a scan, lies between an
output and the next input), the residual stream before a norm, or what attention takes and gives. vLLM joins projections
and renames modules; `map_landmarks` finds the engine's value of each landmark.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor, nn
from transformers import PreTrainedModel

from lockstep.lab.locate.engine_trace import EngineTrace
from lockstep.rollout.errors import ConfigError

LAYER = re.compile(r"^(?:.*\.)?layers\.(\d+)\.")
PACKED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
    "q_a_proj": ("fused_qkv_a_proj", 0),
    "kv_a_proj_with_mqa": ("fused_qkv_a_proj", 1),
    "w1": ("w13", 0),
    "w3": ("w13", 1),
}
"""Module of vLLM that joins projections, and the place of each in it."""
ALIASES = (
    ("self_attn", "attn"),
    ("embed_tokens", "embedding"),
    (".mlp", ".block_sparse_moe"),
    ("embed_tokens", "embeddings"),
    ("mlp.gate", "mlp.router"),
    ("feed_forward", "mlp"),
    ("mlp.gate", "block_sparse_moe.gate"),
    ("mlp", "feed_forward"),
)
"""Parts of names in transformers, and in vLLM."""
OTHER_FUNCTIONS = frozenset({"act_fn", "rotary_emb", "embed_tokens"})
"""Same name, other function: vLLM's activation multiplies too, its rotary embedding rotates, and Gemma's embedding is
scaled later."""
SHARED_EXPERTS = frozenset({"experts", "shared_expert", "shared_experts", "shared_expert_gate"})
"""Modules that vLLM computes inside of its experts if a block has a shared expert."""
ROUTERS = frozenset({"gate", "router"})
BLOCKS = re.compile(r"|model|(?:.*\.)?layers\.\d+(?:\.(?:self_attn|mlp))?")
"""Names of modules that hold operators."""

KNOWN = frozenset({
    "qwen2", "qwen3", "llama", "gemma2", "gemma3_text", "mistral", "phi3", "qwen3_moe", "qwen2_moe", "mixtral", "olmoe",
    "glm4_moe", "deepseek_v2", "deepseek_v3", "minimax_m2", "granitemoe", "gpt_oss", "llama4_text", "falcon_h1",
    "nemotron_h", "granitemoehybrid", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lfm2", "lfm2_moe",
})  # fmt: skip
"""Model types whose map was tested: without a fault nothing is named (tests/integration/test_locate.py)."""
INTERLEAVED = frozenset({"llama4_text"})
"""Model types whose queries and keys vLLM orders by halves, where transformers has pairs."""
SCORES_FIRST = frozenset({"llama4_text"})
"""Model types whose router gives scores in transformers, and logits in vLLM."""


class Part(StrEnum):
    """Which value of a module. The order is that of the computation."""

    STREAM = "residual stream before"
    INPUT = "input of"
    OUTPUT = "output of"
    QUERY = "rotated queries of"
    KEY = "rotated keys of"
    VALUE = "values of"
    ATTENTION = "attention of"
    ROUTES = "routes of"
    LOGITS = "logits"
    LOGPROB = "log-softmax"


@dataclass(frozen=True, slots=True)
class Landmark:
    module: str
    """Name in the trainer's model."""
    part: Part

    @property
    def layer(self) -> int | None:
        """Number of the layer, from 0; None outside of the layers."""
        match = LAYER.match(self.module)
        return int(match[1]) if match else None

    @property
    def operator(self) -> str:
        """Name of the operator that computes the value, within its layer; the same for queries and keys, which a
        rotary embedding computes together."""
        inner = LAYER.sub("", self.module)
        match self.part:
            case Part.QUERY | Part.KEY:
                return f"{inner}.rotary"
            case Part.ATTENTION:
                return f"{inner}.attention"
            case Part.LOGITS:
                return "head"
            case Part.INPUT if inner.endswith(".o_proj"):  # latent attention has no landmark inside
                return f"{inner.removesuffix('.o_proj')}.attention"
            case Part.OUTPUT | Part.ROUTES:
                return inner.removeprefix("model.")
            case Part.LOGPROB:
                return "log_softmax"
            case _:
                return f"{self.part} {inner.removeprefix('model.')}"

    @property
    def label(self) -> str:
        """The operator, and which of its values this is if it has several."""
        detail = {Part.QUERY: " (queries)", Part.KEY: " (keys)", Part.ROUTES: " (choice of experts)"}
        return self.operator + detail.get(self.part, "")


LOGITS = Landmark("lm_head", Part.LOGITS)
LOGPROB = Landmark("lm_head", Part.LOGPROB)


@dataclass(frozen=True, slots=True, kw_only=True)
class LandmarkMap:
    """The engine's values of all landmarks inside the decoder."""

    values: Mapping[Landmark, Tensor]
    """(T, C) each."""
    routes: Mapping[str, tuple[Tensor, Tensor]]
    """(T, k) weights and ids of the chosen experts, by the name of the trainer's router."""
    unmapped: tuple[str, ...]
    """Modules with weights of the trainer without a landmark: their errors appear at the next landmark."""


def map_landmarks(model: PreTrainedModel, trace: EngineTrace) -> LandmarkMap:
    """Find the engine's values. Raises `ConfigError` for a model type whose map was not tested."""
    model_type = model.config.get_text_config().model_type
    refuse_unknown(model_type)
    finder = _Finder(trace)
    values: dict[Landmark, Tensor] = {}
    routes: dict[str, tuple[Tensor, Tensor]] = {}
    unmapped = []
    for name, module in model.named_modules():
        attention = finder.attention(name)
        if attention is not None:
            for part, value in zip((Part.QUERY, Part.KEY, Part.VALUE, Part.ATTENTION), attention, strict=True):
                values[Landmark(name, part)] = value
        is_other = model_type in SCORES_FIRST and name.endswith(".router")
        value = None if is_other else finder.module(name)
        if value is None:
            if any(True for _ in module.parameters(recurse=False)) and name != "lm_head":
                unmapped.append(name)
            continue
        inputs, output = value
        values[Landmark(name, Part.OUTPUT)] = output
        is_norm = "norm" in name.rpartition(".")[2]
        if is_norm and (stream := finder.stream(name)) is not None:
            values[Landmark(name, Part.STREAM)] = stream
        # A norm's input is a landmark already, unless a gate comes with it.
        if inputs and (not is_norm or finder.is_gated(name)):
            values[Landmark(name, Part.INPUT)] = inputs[0]
        if (experts := finder.routes(name)) is not None:
            routes[name] = experts
    if model_type in INTERLEAVED:
        head_dim = model.config.get_text_config().head_dim
        values = {at: _in_pairs(value, head_dim) if _is_rotated(at) else value for at, value in values.items()}
    return LandmarkMap(values=values, routes=routes, unmapped=tuple(unmapped))


def refuse_unknown(model_type: str) -> None:
    """Raise `ConfigError` for a model type whose map was not tested."""
    if model_type not in KNOWN:
        raise ConfigError(
            f"--locate has no map from the operators of model type {model_type} to those of vLLM, and would name wrong "
            f"ones; it has one for {', '.join(sorted(KNOWN))}. Leave out --locate to compare log-probabilities"
        )


class _Finder:
    """Names of the trainer's modules in the engine."""

    def __init__(self, trace: EngineTrace) -> None:
        self._trace = trace

    def _names(self, name: str) -> list[str]:
        return [name, *(name.replace(ours, theirs) for ours, theirs in ALIASES if ours in name)]

    def _place(self, name: str) -> tuple[str, slice] | None:
        """Return the engine's module and the columns of its output."""
        last = name.rpartition(".")[2]
        if last in OTHER_FUNCTIONS or (BLOCKS.fullmatch(name) and not self._is_operator(name)):
            return None
        for other in self._names(name):
            parent = other[: len(other) - len(other.rpartition(".")[2])]
            if last in SHARED_EXPERTS and self._has_shared_expert(parent):
                return None
            if self._trace.outputs.get(other):
                return other, slice(None)
            if last in PACKED:
                packed, index = PACKED[last]
                sizes = self._trace.output_sizes.get(parent + packed)
                if sizes and self._trace.outputs.get(parent + packed) and index < len(sizes):
                    return parent + packed, slice(sum(sizes[:index]), sum(sizes[: index + 1]))
        return None

    def _is_operator(self, name: str) -> bool:
        """True for an MLP whose inner modules the engine does not have: a sparse block."""
        return name.endswith(".mlp") and f"{name}.down_proj" not in self._trace.outputs

    def _has_shared_expert(self, parent: str) -> bool:
        return any(name.startswith(f"{parent}shared_expert") for name in self._trace.outputs)

    def module(self, name: str) -> tuple[tuple[Tensor, ...], Tensor] | None:
        """Return the inputs and the first output of a module."""
        if (place := self._place(name)) is None:
            return None
        engine_name, columns = place
        output = self._trace.outputs[engine_name][0]
        if not output.numel():
            return None
        return tuple(one for one in self._trace.inputs[engine_name] if one.numel()), output[:, columns]

    def _io(self, name: str) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        place = self._place(name)
        assert place is not None
        return self._trace.inputs[place[0]], self._trace.outputs[place[0]]

    def stream(self, name: str) -> Tensor | None:
        """Return the residual stream before a norm: vLLM's second output, or the only input of a layer's first norm."""
        inputs, outputs = self._io(name)
        if len(inputs) == len(outputs) == 2:
            return outputs[1]
        return inputs[0] if len(inputs) == 1 and name.endswith("input_layernorm") else None

    def is_gated(self, name: str) -> bool:
        inputs, outputs = self._io(name)
        return (len(inputs), len(outputs)) == (2, 1)

    def attention(self, name: str) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """Return rotated queries, rotated keys, values and output of the attention inside of a module."""
        for other in (f"{one}.attn" for one in self._names(name)):
            inputs, outputs = self._trace.inputs.get(other, ()), self._trace.outputs.get(other, ())
            if len(inputs) == 3 and outputs and all(one.numel() for one in (*inputs, outputs[0])):
                return inputs[0], inputs[1], inputs[2], outputs[0]
        return None

    def routes(self, name: str) -> tuple[Tensor, Tensor] | None:
        """Return weights and ids of the experts that stand beside a router."""
        if name.rpartition(".")[2] not in ROUTERS or (place := self._place(name)) is None:
            return None
        return self._trace.routes.get(f"{place[0].rpartition('.')[0]}.experts")


def _is_rotated(landmark: Landmark) -> bool:
    is_projection = landmark.part is Part.OUTPUT and landmark.module.endswith(("self_attn.q_proj", "self_attn.k_proj"))
    return is_projection or landmark.part in (Part.QUERY, Part.KEY)


def _in_pairs(value: Tensor, head_dim: int) -> Tensor:
    """Reorder (T, heads x head_dim) from halves to pairs."""
    return value.reshape(len(value), -1, 2, head_dim // 2).transpose(2, 3).reshape(len(value), -1)


def layers_of(model: nn.Module) -> int:
    """Return the number of layers."""
    numbers = [int(match[1]) for name, _ in model.named_modules() if (match := LAYER.match(f"{name}."))]
    return 1 + max(numbers, default=-1)
