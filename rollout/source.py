"""The trainer's weights as vLLM reads them: full tensors, by layer group, under the names of the checkpoint.

Plain modules, DDP, DeepSpeed ZeRO-1/2 (whose parameters are whole on every rank) and ZeRO-3 (whose parameters
are shards) go through one class. A ZeRO-3 model is gathered one bucket at a time, one collective call per bucket,
never the whole model and never one collective per tensor.

LoRA adapters are merged into the copies that are sent; the training weights are never written.

Covered: PEFT LoRA on layers that offer `get_delta_weight` (linear, embedding, convolution), `modules_to_save`,
tied weights (sent once, under the name that the module lists first), experts (`rollout/experts.py`).
Not covered: DoRA (refused), models whose checkpoint names differ from their module names by more than that.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

from rollout import experts
from rollout.buckets import DEFAULT_BUCKET_BYTES, plan_buckets
from rollout.errors import SyncError

if TYPE_CHECKING:
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class _Entry:
    """One parameter as it is sent."""

    meta: ParamMeta
    params: tuple[nn.Parameter, ...]
    """What must be whole before `read` is called."""
    read: Callable[[], torch.Tensor]
    is_copy: bool
    """Whether `read` makes a new tensor, or an alias of the training weight."""


class ZeroSource(WeightSource):
    """A `WeightSource` over the module that is trained, wrapped as it is.

    Under ZeRO-3 iterating is a collective: every rank must iterate, to the end. A rank that stops early calls
    `drain`, so that the others do not wait for it in a gather.

    Args:
        module: plain, DDP, DeepSpeed engine, PEFT, or these nested.
        dtype: of the engine's weights; floating-point parameters are cast on the way. None: as they are.
        bucket_bytes: gathered at once; a tensor that is larger is gathered by itself.
    """

    def __init__(
        self, module: nn.Module, *, dtype: torch.dtype | None = None, bucket_bytes: int = DEFAULT_BUCKET_BYTES
    ) -> None:
        if bucket_bytes < 1:
            raise SyncError(f"bucket_bytes must be positive, found {bucket_bytes}")
        entries = {entry.meta.name: entry for entry in _entries(unwrap(module), dtype)}
        plan = plan_buckets([entry.meta for entry in entries.values()], bucket_bytes)
        self._buckets = [[entries[meta.name] for meta in bucket] for bucket in plan]
        self._metas = [meta for bucket in plan for meta in bucket]
        self._unread: Iterator[Sequence[_Entry]] = iter(())
        self.gather_s = 0.0
        """Seconds that the last pass spent gathering and copying."""

    def metadata(self) -> list[ParamMeta]:
        """Names, dtypes and full shapes in the order of iteration. No collective, no copy."""
        return list(self._metas)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._unread = iter(self._buckets)
        self.gather_s = 0.0
        for bucket in self._unread:
            tensors = self._gather(bucket)
            for entry in bucket:
                yield entry.meta.name, tensors.pop(0)

    def drain(self) -> None:
        """Take part in the gathers that this rank's last pass left out. Nothing is kept."""
        for bucket in self._unread:
            self._gather(bucket)

    @torch.no_grad()
    def _gather(self, bucket: Sequence[_Entry]) -> list[torch.Tensor]:
        started = time.perf_counter()
        params = {id(param): param for entry in bucket for param in entry.params}
        tensors = []
        with _whole(list(params.values())) as is_gathered:
            for entry in bucket:
                tensor = entry.read().detach().to(entry.meta.dtype)
                # A gathered weight is freed on leaving the context, and a consumer may keep the tensor longer.
                aliases = not entry.is_copy and tensor.dtype == entry.params[0].dtype
                tensors.append(tensor.clone() if aliases and is_gathered else tensor)
        self.gather_s += time.perf_counter() - started
        return tensors


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


class _whole:
    """Context in which sharded parameters are whole; its value says whether any had to be gathered."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self._sharded = [param for param in params if _is_sharded(param)]
        self._context: AbstractContextManager[object] = nullcontext()

    def __enter__(self) -> bool:
        if self._sharded:
            from deepspeed import zero

            self._context = zero.GatheredParameters(self._sharded, modifier_rank=None)
            self._context.__enter__()
        return bool(self._sharded)

    def __exit__(self, *exception: Any) -> None:
        self._context.__exit__(*exception)


def _is_sharded(param: nn.Parameter) -> bool:
    if "deepspeed" not in sys.modules:
        return False
    from deepspeed.runtime.zero.utils import is_zero_param

    return is_zero_param(param)


def _full_shape(param: nn.Parameter) -> tuple[int, ...]:
    return tuple(param.ds_shape) if _is_sharded(param) else tuple(param.shape)  # type: ignore[attr-defined]


def _wire_dtype(param: nn.Parameter, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and param.dtype.is_floating_point else param.dtype


def _entries(module: nn.Module, dtype: torch.dtype | None) -> Iterator[_Entry]:
    if "peft" in sys.modules:
        from peft import PeftModel

        if isinstance(module, PeftModel):
            yield from _peft_entries(module, dtype)
            return
    for name, param in module.named_parameters():
        yield from _plain_entries(name, param, dtype, module)


def _plain_entries(name: str, param: nn.Parameter, dtype: torch.dtype | None, model: nn.Module) -> Iterator[_Entry]:
    """One, or for the experts of a layer as many as the checkpoint has."""
    shape, wire = _full_shape(param), _wire_dtype(param, dtype)
    if not experts.is_stacked(name, shape):
        yield _Entry(ParamMeta(name, wire, shape), (param,), lambda: param, is_copy=False)
        return
    assert isinstance(model, PreTrainedModel), "experts are known by the type of their model"
    for part_name, part_shape, read in experts.parts(name, shape, model.config.get_text_config().model_type):
        yield _Entry(ParamMeta(part_name, wire, part_shape), (param,), partial(read, param), is_copy=False)


def _peft_entries(model: PeftModel, dtype: torch.dtype | None) -> Iterator[_Entry]:
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


def _merged_entry(name: str, layer: LoraLayer, weight: nn.Parameter, dtype: torch.dtype | None) -> _Entry:
    if layer.lora_magnitude_vector:
        raise SyncError(f"weight sync cannot merge DoRA ({name}); set LoraConfig.use_dora=False")
    adapters = [name for name in layer.active_adapters if name in layer.scaling and name not in layer.merged_adapters]
    if layer.disable_adapters:
        adapters = []

    def read() -> torch.Tensor:
        # Added in float32 so that a small update is not rounded away before the sum is.
        total = weight.to(torch.float32, copy=True)
        for adapter in adapters:
            total += layer.get_delta_weight(adapter).to(total)  # type: ignore[attr-defined]
        return total

    meta = ParamMeta(name, _wire_dtype(weight, dtype), _full_shape(weight))
    adapter_params = [p for n, p in layer.named_parameters() if n.startswith("lora_")]  # type: ignore[attr-defined]
    return _Entry(meta, (weight, *adapter_params), read, is_copy=True)
