"""The trainer's weights as vLLM reads them: full tensors, by layer group, under the names of the checkpoint.

Plain modules, DDP, DeepSpeed ZeRO-1/2 (whose parameters are whole on every rank) and ZeRO-3 (whose parameters
are shards) go through one class. A ZeRO-3 model is fetched one bucket at a time (`rollout/shards.py`), to the ranks
that send it and no others; the next bucket is fetched while the consumer sends the last one.

    wait for bucket k ─► begin to fetch k + 1 to where it is sent from ─► send k ─► wait for k + 1 ...

So a sender holds one bucket on its way in and the one that it sends. LoRA adapters are
merged into the copies that are sent; the training weights are never written.

Covered: PEFT LoRA on layers that offer `get_delta_weight` (linear, embedding, convolution), `modules_to_save`,
tied weights (sent once, under the name that the module lists first), experts (`rollout/experts.py`).
Not covered: DoRA (refused), models whose checkpoint names differ from their module names by more than that. A merged
weight takes its size in float32 beside the buckets while it is added up, and adapters arrive beside them, like the
weights that they are added to if those are of another dtype than the engine's.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

from rollout import experts
from rollout.buckets import DEFAULT_BUCKET_BYTES, plan_buckets
from rollout.errors import SyncError
from rollout.shards import Fetch, Piece, elements, full_shape, is_sharded

if TYPE_CHECKING:
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

Place = Callable[[Sequence[ParamMeta]], Sequence[torch.Tensor]]
"""Where the tensors of the next bucket are to be written: contiguous, of their dtypes and shapes. May wait for room."""

PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class _Entry:
    """One parameter as it is sent."""

    meta: ParamMeta
    pieces: tuple[Piece, ...]
    """What it is made of."""
    merge: Callable[[Sequence[torch.Tensor]], torch.Tensor] | None = None
    """From the pieces, each in the shape of its parameter, to the tensor; None: it is the one piece."""


@dataclass(frozen=True, slots=True)
class _Arriving:
    """An entry whose pieces are being fetched."""

    entry: _Entry
    place: torch.Tensor | None
    values: list[torch.Tensor]
    """Of the pieces: where they arrive, or the training weights themselves."""

    def tensor(self) -> torch.Tensor:
        """The entry's value, once its pieces are there: in its place, or else in new memory or the training weight."""
        merge = self.entry.merge
        value = self.values[0] if merge is None else merge(self.values)
        if self.place is None:
            return value.to(self.entry.meta.dtype)
        return self.place if value is self.place else self.place.copy_(value)


class _Bucket:
    """Entries that are fetched together."""

    def __init__(self, entries: Sequence[_Entry], readers: Sequence[int] | None) -> None:
        self.entries = entries
        self.metas = [entry.meta for entry in entries]
        self.fetch = Fetch([piece for entry in entries for piece in entry.pieces], readers)

    def begin(self, places: Sequence[torch.Tensor | None]) -> deque[_Arriving]:
        """Start the exchange. places: of a reader, one for each entry; of another rank none."""
        arriving = deque(
            _Arriving(
                entry, place, [_value(piece, place if piece is entry.pieces[0] else None) for piece in entry.pieces]
            )
            for entry, place in zip(self.entries, places, strict=False)
        )
        self.fetch.begin([value for one in arriving for value in one.values])
        return arriving


def _value(piece: Piece, place: torch.Tensor | None) -> torch.Tensor:
    """Where a piece arrives: in its place if it is sent as it is; the training weight if that is whole."""
    if not is_sharded(piece.param):
        return elements(piece)
    if place is not None and (place.dtype, place.device) == (piece.dtype, piece.param.device):
        return place
    return torch.empty(piece.shape, dtype=piece.dtype, device=piece.param.device)


class ZeroSource(WeightSource):
    """A `WeightSource` over the module that is trained, wrapped as it is.

    Under ZeRO-3 iterating is a collective: every rank must iterate, to the end. A rank that stops early calls
    `drain`, so that the others do not wait for it.

    Args:
        module: plain, DDP, DeepSpeed engine, PEFT, or these nested.
        dtype: of the engine's weights; floating-point parameters are cast on the way. None: as they are.
        bucket_bytes: fetched at once, as they are sent; a tensor that is larger is fetched by itself.
        readers: ranks that get the tensors; on others iterating yields nothing. None: all.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        dtype: torch.dtype | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        readers: Sequence[int] | None = None,
    ) -> None:
        if bucket_bytes < 1:
            raise SyncError(f"bucket_bytes must be positive, found {bucket_bytes}")
        module = unwrap(module)
        entries = {entry.meta.name: entry for entry in _entries(module, dtype)}
        plan = plan_buckets([entry.meta for entry in entries.values()], bucket_bytes)
        self._is_reader = readers is None or _own_rank() in readers
        self._buckets = [_Bucket([entries[meta.name] for meta in bucket], readers) for bucket in plan]
        self._waiting: deque[_Bucket] = deque()
        """Buckets of this pass that were not begun."""
        self._fetched: _Bucket | None = None
        """What is being fetched, or was fetched last."""
        self._is_in_step = True
        """Whether this rank has begun every exchange that it came to."""
        self._arriving: deque[_Arriving] = deque()
        """What a reader has not given away of it."""
        self.gather_s = 0.0
        """Seconds that the last pass spent waiting for buckets and copying them."""

    def metadata(self) -> list[ParamMeta]:
        """Names, dtypes and full shapes in the order of iteration. No collective, no copy."""
        return [meta for bucket in self.buckets() for meta in bucket]

    def buckets(self) -> list[list[ParamMeta]]:
        """The same as they are fetched together."""
        return [bucket.metas for bucket in self._buckets]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors, which stay as they are until the next optimizer step."""
        return self.tensors(None)

    def tensors(self, place: Place | None) -> Iterator[tuple[str, torch.Tensor]]:
        """A pass in which tensors are written where `place` says, asked for each bucket before its exchange begins."""
        self.gather_s = 0.0
        self._waiting = deque(self._buckets)
        self._begin_next(place)
        while (bucket := self._fetched) is not None:
            with self._timed():
                bucket.fetch.wait()
            for meta in bucket.metas if self._is_reader else ():
                with self._timed():
                    tensor = self._arriving.popleft().tensor()
                if meta is bucket.metas[-1]:
                    self._begin_next(place)
                yield meta.name, tensor
            if not self._is_reader:
                self._begin_next(place)

    def drain(self) -> None:
        """Take part in what this rank's last pass left out. Nothing is kept.

        A rank that failed where it should have begun an exchange leaves the others to their deadline: nobody knows
        whether they wait for this one or the next, which is of another size.
        """
        while self._fetched is not None and self._is_in_step:
            self._fetched.fetch.wait()
            self._begin_next(None)
        self._arriving.clear()

    def _begin_next(self, place: Place | None) -> None:
        if not self._waiting:
            self._fetched = None
            return
        bucket = self._waiting[0]
        places: Sequence[torch.Tensor | None] = [None] * len(bucket.metas) if self._is_reader else []
        if place is not None and self._is_reader:
            places = place(bucket.metas)  # may raise: then this bucket is left for `drain`
        with self._timed():
            self._fetched, self._is_in_step = self._waiting.popleft(), False
            self._arriving = bucket.begin(places)
            self._is_in_step = True

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.gather_s += time.perf_counter() - started


def _own_rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


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
    shape, wire = full_shape(param), _wire_dtype(param, dtype)
    parts: Iterable[tuple[str, tuple[int, ...], int]] = [(name, shape, 0)]
    if experts.is_stacked(name, shape):
        assert isinstance(model, PreTrainedModel), "experts are known by the type of their model"
        parts = experts.parts(name, shape, model.config.get_text_config().model_type)
    for part_name, part_shape, first in parts:
        yield _Entry(ParamMeta(part_name, wire, part_shape), (Piece(param, first, part_shape, wire),))


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
    return _Entry(meta, pieces, merge)


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
