"""Mapping of a module's parameters to checkpoint-named tensors for weight transfer.

LoRA adapters are merged into copies; the training weights are never modified. transformers stacks all experts of a
layer in one tensor; checkpoints, and so vLLM's loaders, have tensors per expert:

    mlp.experts.gate_up_proj (E, 2I, D)  ->  mlp.experts.<e>.gate_proj.weight, mlp.experts.<e>.up_proj.weight (I, D)
    mlp.experts.down_proj    (E, D, I)   ->  mlp.experts.<e>.down_proj.weight (D, I)

Covered: PEFT LoRA on layers with `get_delta_weight` (linear, embedding, convolution), `modules_to_save`, tied weights
(sent once, under the first name), experts of qwen2_moe, qwen3_moe and gpt_oss (whose checkpoints are stacked too).
Refused: DoRA, and experts of other model types: a wrong name would load weights in the wrong place. Not covered: models
whose checkpoint names differ from their module names in other ways.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel
from vllm.distributed.weight_transfer.base import ParamMeta

from rollout.errors import SyncError
from rollout.weights.shards import ParamRange, full_shape

if TYPE_CHECKING:
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

PEFT_PREFIX = "base_model.model."
EXPERTS_SEPARATE = ("qwen2_moe", "qwen3_moe")
"""Model types whose checkpoints have tensors per expert, under the names above."""
EXPERTS_STACKED = ("gpt_oss",)
"""Model types whose checkpoints are stacked as in transformers."""
EXPERTS_NAME = re.compile(r"(?P<layer>.+\.mlp\.experts)\.(?P<kind>gate_up_proj|down_proj)")


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """One tensor of the checkpoint and its source."""

    meta: ParamMeta
    ranges: tuple[ParamRange, ...]
    merge: Callable[[Sequence[torch.Tensor]], torch.Tensor] | None = None
    """Computes the tensor from the ranges, each in the shape of its parameter; None: the tensor is the only range."""

    def value(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the tensor for these values of its ranges: in new memory, or the only range itself."""
        return (values[0] if self.merge is None else self.merge(values)).to(self.meta.dtype)


def checkpoint_tensors(module: nn.Module, dtype: torch.dtype | None) -> Iterator[CheckpointTensor]:
    """Yield the tensors of an unwrapped module. dtype: cast of floating-point parameters; None: no cast."""
    if "peft" in sys.modules:
        from peft import PeftModel

        if isinstance(module, PeftModel):
            yield from _peft_tensors(module, dtype)
            return
    for name, param in module.named_parameters():
        yield from _plain_tensors(name, param, dtype, module)


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside DDP, a DeepSpeed engine or `torch.compile`, in any nesting."""
    wrappers: list[type] = [nn.parallel.DistributedDataParallel]
    if "deepspeed" in sys.modules:  # importing it takes seconds; without it no module is its engine
        from deepspeed import DeepSpeedEngine

        wrappers.append(DeepSpeedEngine)
    while True:
        if isinstance(module, tuple(wrappers)):
            module = module.module  # type: ignore[assignment]
        elif isinstance(module, torch._dynamo.OptimizedModule):
            module = module._orig_mod
        else:
            return module


def _sent_dtype(param: nn.Parameter, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and param.dtype.is_floating_point else param.dtype


def _plain_tensors(
    name: str, param: nn.Parameter, dtype: torch.dtype | None, model: nn.Module
) -> Iterator[CheckpointTensor]:
    """Yield one tensor, or one per expert matrix of the checkpoint."""
    shape, sent = full_shape(param), _sent_dtype(param, dtype)
    parts: Iterable[tuple[str, tuple[int, ...], int]] = [(name, shape, 0)]
    if len(shape) == 3 and ".experts." in name:
        assert isinstance(model, PreTrainedModel), "experts are named by model type"
        parts = _expert_parts(name, shape, model.config.get_text_config().model_type)
    for part_name, part_shape, first in parts:
        yield CheckpointTensor(ParamMeta(part_name, sent, part_shape), (ParamRange(param, first, part_shape, sent),))


def _expert_parts(name: str, shape: tuple[int, ...], model_type: str) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Yield name, shape and first element of each checkpoint tensor in a stacked one; each is contiguous in it.

    Raises `SyncError` for a model type that is not covered.
    """
    if model_type in EXPERTS_STACKED:
        yield name, shape, 0
        return
    match = EXPERTS_NAME.fullmatch(name)
    if model_type not in EXPERTS_SEPARATE or match is None:
        raise SyncError(
            f"weight sync does not know how the engine names the experts in {name} of a {model_type} model; set "
            f"model.path to a model of type {', '.join((*EXPERTS_SEPARATE, *EXPERTS_STACKED))}, or to one without "
            "experts"
        )
    layer = match["layer"]
    for expert in range(shape[0]):
        first = expert * shape[1] * shape[2]
        if match["kind"] == "down_proj":
            yield f"{layer}.{expert}.down_proj.weight", shape[1:], first
            continue
        half = (shape[1] // 2, shape[2])
        yield f"{layer}.{expert}.gate_proj.weight", half, first
        yield f"{layer}.{expert}.up_proj.weight", half, first + half[0] * half[1]


def _peft_tensors(model: PeftModel, dtype: torch.dtype | None) -> Iterator[CheckpointTensor]:
    """Yield base weights plus active adapters, under the names of the wrapped model."""
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    merged: dict[str, LoraLayer] = {}  # adapted layers, by the full name of their base weight
    not_sent: list[str] = []  # prefixes of adapters, and of the originals of fully trained modules
    renamed = {PEFT_PREFIX: "", ".base_layer.": "."}
    for path, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            merged[f"{path}.base_layer.weight"] = layer
            not_sent += [f"{path}.{adapter}." for adapter in layer.adapter_layer_names]
        elif isinstance(layer, ModulesToSaveWrapper):
            active = layer.active_adapters[0]
            not_sent += [f"{path}.original_module."]
            not_sent += [f"{path}.modules_to_save.{name}." for name in layer.modules_to_save if name != active]
            renamed[f".modules_to_save.{active}."] = "."
        elif isinstance(layer, BaseTunerLayer):
            raise SyncError(
                f"weight sync merges only LoRA adapters, found {type(layer).__name__} at {path}; train with "
                "peft.LoraConfig, or without an adapter"
            )
    _refuse_tied(model, set(merged))
    for full_name, param in model.named_parameters():
        if full_name.startswith(tuple(not_sent)):
            continue
        name = full_name
        for old, new in renamed.items():
            name = name.replace(old, new)
        if full_name in merged:
            yield _merged_tensor(name, merged[full_name], param, dtype)
        else:
            yield from _plain_tensors(name, param, dtype, model.get_base_model())


def _refuse_tied(model: nn.Module, adapted: set[str]) -> None:
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    for tied in names.values():
        if len(tied) > 1 and adapted.intersection(tied):
            raise SyncError(
                f"an adapter on one of the tied weights {tied} cannot be merged: the engine holds one weight for both; "
                "remove embedding and head from LoraConfig.target_modules"
            )


def _merged_tensor(name: str, layer: LoraLayer, weight: nn.Parameter, dtype: torch.dtype | None) -> CheckpointTensor:
    if layer.lora_magnitude_vector:
        raise SyncError(f"weight sync cannot merge DoRA ({name}); set LoraConfig.use_dora=False")
    adapters = [name for name in layer.active_adapters if name in layer.scaling and name not in layer.merged_adapters]
    if layer.disable_adapters:
        adapters = []
    adapter_params = [p for n, p in layer.named_parameters() if n.startswith("lora_")]  # type: ignore[attr-defined]

    def merge(values: Sequence[torch.Tensor]) -> torch.Tensor:
        # In float32, so that a small update is not rounded away.
        total = values[0].to(torch.float32, copy=True)
        with torch.no_grad(), _replaced_data(adapter_params, values[1:]):
            for adapter in adapters:
                total += layer.get_delta_weight(adapter).to(total)  # type: ignore[attr-defined]
        return total

    meta = ParamMeta(name, _sent_dtype(weight, dtype), full_shape(weight))
    ranges = tuple(ParamRange(p, 0, full_shape(p), p.dtype) for p in (weight, *adapter_params))
    return CheckpointTensor(meta, ranges, merge)


@contextmanager
def _replaced_data(params: Sequence[nn.Parameter], values: Sequence[torch.Tensor]) -> Iterator[None]:
    """Replace the parameters' data, which ZeRO-3 empties, for the duration of the block."""
    before = [param.data for param in params]
    try:
        for param, value in zip(params, values, strict=True):
            param.data = value
        yield
    finally:
        for param, data in zip(params, before, strict=True):
            param.data = data
