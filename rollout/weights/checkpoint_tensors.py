"""What of a module is sent to an engine: every parameter under the name of the checkpoint, and how it comes about.

LoRA adapters are merged into copies; the training weights are never written.

Covered: PEFT LoRA on layers that offer `get_delta_weight` (linear, embedding, convolution), `modules_to_save`,
tied weights (sent once, under the name that the module lists first), experts (`rollout/weights/experts.py`).
Not covered: DoRA (refused), models whose checkpoint names differ from their module names by more than that.
"""

from __future__ import annotations

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
from rollout.weights import experts
from rollout.weights.shards import Piece, full_shape

if TYPE_CHECKING:
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter as it is sent."""

    meta: ParamMeta
    pieces: tuple[Piece, ...]
    """What it is made of."""
    merge: Callable[[Sequence[torch.Tensor]], torch.Tensor] | None = None
    """From the pieces, each in the shape of its parameter, to the tensor; None: it is the one piece."""


def entries_of(module: nn.Module, dtype: torch.dtype | None) -> Iterator[Entry]:
    """module: unwrapped. dtype: to cast floating-point parameters to; None: as they are."""
    if "peft" in sys.modules:
        from peft import PeftModel

        if isinstance(module, PeftModel):
            yield from _peft_entries(module, dtype)
            return
    for name, param in module.named_parameters():
        yield from _plain_entries(name, param, dtype, module)


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside DDP, a DeepSpeed engine or `torch.compile`, in any nesting."""
    wrappers: list[type] = [nn.parallel.DistributedDataParallel]
    if "deepspeed" in sys.modules:  # importing it takes seconds; a module cannot be its engine before it is imported
        from deepspeed import DeepSpeedEngine

        wrappers.append(DeepSpeedEngine)
    while True:
        if isinstance(module, tuple(wrappers)):
            module = module.module  # type: ignore[assignment]
        elif isinstance(module, torch._dynamo.OptimizedModule):
            module = module._orig_mod
        else:
            return module


def _wire_dtype(param: nn.Parameter, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and param.dtype.is_floating_point else param.dtype


def _plain_entries(name: str, param: nn.Parameter, dtype: torch.dtype | None, model: nn.Module) -> Iterator[Entry]:
    """One, or for the experts of a layer as many as the checkpoint has."""
    shape, wire = full_shape(param), _wire_dtype(param, dtype)
    parts: Iterable[tuple[str, tuple[int, ...], int]] = [(name, shape, 0)]
    if experts.is_stacked(name, shape):
        assert isinstance(model, PreTrainedModel), "experts are known by the type of their model"
        parts = experts.parts(name, shape, model.config.get_text_config().model_type)
    for part_name, part_shape, first in parts:
        yield Entry(ParamMeta(part_name, wire, part_shape), (Piece(param, first, part_shape, wire),))


def _peft_entries(model: PeftModel, dtype: torch.dtype | None) -> Iterator[Entry]:
    """Base weights with the active adapters added, under the names of the model that was wrapped."""
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    merged: dict[str, LoraLayer] = {}  # adapted layers by the full name of their base weight
    not_sent: list[str] = []  # prefixes of adapters, and of the originals of modules that are trained whole
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
                f"weight sync merges LoRA adapters only, but {path} is a {type(layer).__name__}; "
                f"train with peft.LoraConfig, or without an adapter"
            )
    _refuse_tied(model, set(merged))
    for full_name, param in model.named_parameters():
        if full_name.startswith(tuple(not_sent)):
            continue
        name = full_name
        for old, new in renamed.items():
            name = name.replace(old, new)
        if full_name in merged:
            yield _merged_entry(name, merged[full_name], param, dtype)
        else:
            yield from _plain_entries(name, param, dtype, model.get_base_model())


def _refuse_tied(model: nn.Module, adapted: set[str]) -> None:
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    for tied in names.values():
        if len(tied) > 1 and adapted.intersection(tied):
            raise SyncError(
                f"an adapter on one of the tied weights {tied} cannot be merged: the engine holds one weight for both. "
                f"Leave the embedding and the head out of LoraConfig.target_modules"
            )


def _merged_entry(name: str, layer: LoraLayer, weight: nn.Parameter, dtype: torch.dtype | None) -> Entry:
    if layer.lora_magnitude_vector:
        raise SyncError(f"weight sync cannot merge DoRA ({name}); set LoraConfig.use_dora=False")
    adapters = [name for name in layer.active_adapters if name in layer.scaling and name not in layer.merged_adapters]
    if layer.disable_adapters:
        adapters = []
    adapter_params = [p for n, p in layer.named_parameters() if n.startswith("lora_")]  # type: ignore[attr-defined]

    def merge(values: Sequence[torch.Tensor]) -> torch.Tensor:
        # Added in float32 so that a small update is not rounded away before the sum is.
        total = values[0].to(torch.float32, copy=True)
        with torch.no_grad(), _standing_in(adapter_params, values[1:]):
            for adapter in adapters:
                total += layer.get_delta_weight(adapter).to(total)  # type: ignore[attr-defined]
        return total

    meta = ParamMeta(name, _wire_dtype(weight, dtype), full_shape(weight))
    pieces = tuple(Piece(p, 0, full_shape(p), p.dtype) for p in (weight, *adapter_params))
    return Entry(meta, pieces, merge)


@contextmanager
def _standing_in(params: Sequence[nn.Parameter], values: Sequence[torch.Tensor]) -> Iterator[None]:
    """Inside, the parameters hold these values instead of their shards."""
    before = [param.data for param in params]
    try:
        for param, value in zip(params, values, strict=True):
            param.data = value
        yield
    finally:
        for param, data in zip(params, before, strict=True):
            param.data = data
