"""Mapping of a module's parameters to checkpoint-named tensors for weight transfer.

LoRA adapters are merged into copies, unless they are sent by themselves (`rollout/weights/adapter_tensors.py`); the
training weights are never modified. Names are those of the checkpoint
(`rollout/weights/checkpoint_names.py`). Buffers that a checkpoint has, such as the correction biases of routers, are
sent in their own dtype.

Covered: PEFT LoRA on layers with `get_delta_weight` (linear, embedding, convolution), `modules_to_save`, tied weights
(sent once, under the first name). Refused: DoRA.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from vllm.distributed.weight_transfer.base import ParamMeta

from lockstep.rollout.errors import SyncError
from lockstep.rollout.weights.checkpoint_names import Place, checkpoint_places
from lockstep.rollout.weights.shards import ParamRange, full_shape

if TYPE_CHECKING:
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

PEFT_PREFIX = "base_model.model."


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
            tensors, adapted_layers = peft_layers(module)
            yield from _tensors(module.get_base_model(), tensors, dtype, adapted_layers)
            return
    yield from _tensors(module, _saved(module), dtype, {})


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


def sent_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is None or not isinstance(tensor, nn.Parameter) or not tensor.dtype.is_floating_point:
        return tensor.dtype
    return dtype


def _saved(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters, tied ones once, and the buffers that a checkpoint has."""
    buffers = {
        f"{path}.{name}" if path else name: buffer
        for path, inner in module.named_modules()
        for name, buffer in inner.named_buffers(recurse=False)
        if name not in inner._non_persistent_buffers_set
    }
    return {**dict(module.named_parameters()), **buffers}


def _tensors(
    model: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype | None,
    adapted: Mapping[str, LoraLayer],
) -> Iterator[CheckpointTensor]:
    """Yield the checkpoint's tensors of these parameters and buffers. Both mappings are by the names in `model`."""
    for place in checkpoint_places(model, {name: full_shape(tensor) for name, tensor in tensors.items()}):
        tensor = tensors[place.source]
        if place.source in adapted:
            yield _merged_tensor(place, adapted[place.source], tensor, dtype)
            continue
        wire_dtype = sent_dtype(tensor, dtype)
        yield CheckpointTensor(
            ParamMeta(place.name, wire_dtype, place.shape), (ParamRange(tensor, place.first, place.shape, wire_dtype),)
        )


def peft_layers(model: PeftModel) -> tuple[dict[str, torch.Tensor], dict[str, LoraLayer]]:
    """Return the saved tensors of a model, without its adapters, and the adapted layers of some of them.

    Both by the names in `model.get_base_model()`. Raises `SyncError` for adapters other than LoRA.
    """
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    merged_layers: dict[str, LoraLayer] = {}  # adapted layers, by the full name of their base weight
    unsent_prefixes: list[str] = []  # prefixes of adapters, and of the originals of fully trained modules
    replacements = {PEFT_PREFIX: "", ".base_layer.": "."}
    for path, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            merged_layers[f"{path}.base_layer.weight"] = layer
            unsent_prefixes += [f"{path}.{adapter}." for adapter in layer.adapter_layer_names]
        elif isinstance(layer, ModulesToSaveWrapper):
            active = layer.active_adapters[0]
            unsent_prefixes += [f"{path}.original_module."]
            unsent_prefixes += [f"{path}.modules_to_save.{name}." for name in layer.modules_to_save if name != active]
            replacements[f".modules_to_save.{active}."] = "."
        elif isinstance(layer, BaseTunerLayer):
            raise SyncError(
                f"weight sync sends only LoRA adapters, found {type(layer).__name__} at {path}; train with "
                "peft.LoraConfig, or without an adapter"
            )
    _refuse_tied(model, set(merged_layers))
    tensors: dict[str, torch.Tensor] = {}
    adapted_layers: dict[str, LoraLayer] = {}
    for full_name, tensor in _saved(model).items():
        if full_name.startswith(tuple(unsent_prefixes)):
            continue
        name = full_name
        for old, new in replacements.items():
            name = name.replace(old, new)
        tensors[name] = tensor
        if full_name in merged_layers:
            adapted_layers[name] = merged_layers[full_name]
    return tensors, adapted_layers


def _refuse_tied(model: nn.Module, adapted: set[str]) -> None:
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    for group in names.values():
        if len(group) > 1 and adapted.intersection(group):
            raise SyncError(
                f"an adapter on one of the tied weights {group} cannot be merged: the engine holds one weight for "
                "both; remove embedding and head from LoraConfig.target_modules"
            )


def _merged_tensor(place: Place, layer: LoraLayer, weight: torch.Tensor, dtype: torch.dtype | None) -> CheckpointTensor:
    name = place.name
    if place.shape != full_shape(weight):
        raise SyncError(f"weight sync cannot merge an adapter on {place.source}, of which checkpoints have parts")
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

    meta = ParamMeta(name, sent_dtype(weight, dtype), place.shape)
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
