"""Probe of the trainer's model: forward passes that note landmarks, force the engine's values, or add errors.

A forced pass overwrites every landmark with the engine's value after noting the trainer's own, so that each operator
computes on the engine's inputs, and its error is its own. The residual stream is overwritten in place, because the
branch around the norm holds the same tensor.

Shape legend: T positions of the row, C channels, V vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from lockstep.lab.locate.landmarks import LOGITS, Landmark, LandmarkMap, Part
from lockstep.lab.locate.wide import Wide
from lockstep.trainer.batch.packing import PackedBatch, collate, whole_row
from lockstep.trainer.model.layers import recurrent
from lockstep.trainer.model.layers.packed_attention import PACKED_ROWS, no_mask, packed_rows_attention

Values = Mapping[Landmark, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Result of one forward pass."""

    values: dict[Landmark, Tensor]
    """(T, C) values that the model computed, in the order of the computation."""
    logits: Tensor
    """(n, V) at the positions of the engine's logits."""
    hidden: Tensor
    """(n, D) inputs of the head there."""


class Probe:
    """Hooks on a model, for the row of a trace."""

    def __init__(
        self,
        model: PreTrainedModel,
        ids: tuple[int, ...],
        engine: LandmarkMap,
        logits: Tensor,
        *,
        is_reference: bool = False,
    ) -> None:
        """ids: of the row, of which the last is not an input. logits: (n, V) of the engine at the last n positions.
        is_reference: compute attention by plain formulas, in place of the trainer's kernels."""
        self._model = model
        self._is_reference = is_reference
        self._packed: PackedBatch = collate([whole_row(ids[:-1])], [0], device=model.device)
        self._engine = engine
        self._logits = logits
        self._num = len(ids) - 1
        self._names = {module: name for name, module in model.named_modules()}
        self._forces, self._added, self._seen = False, dict[Landmark, Tensor](), dict[Landmark, Tensor]()
        self._hidden = torch.empty(0)
        self._flipped = dict[str, Tensor]()
        """(T, 1) positions at which a router chooses other experts than the engine, on the engine's inputs: known from
        a forced pass."""
        self.mismatched: set[Landmark] = set()
        """Landmarks at which engine and trainer have values of other shapes."""

    def run(self, *, forces: bool = False, added: Values | None = None, is_wide: bool = False) -> Pass:
        """Run the model. added: errors that are added to the trainer's values. is_wide: float64 throughout."""
        self._forces, self._added, self._seen = forces, dict(added or {}), {}
        plain = {"input_ids": self._packed.ids[None], "position_ids": self._packed.position_ids[None]}
        arguments: dict[str, Any] = {"attention_mask": no_mask(self._packed), "packed": self._packed}
        if any(recurrent.recurrent_layers(self._model)):
            arguments |= recurrent.row_arguments(self._packed)
        with torch.no_grad(), self._hooked(), Wide() if is_wide else nullcontext():
            logits = self._model(**plain, **arguments, use_cache=False).logits[0]
        own = self._seen[LOGITS] = logits[-len(self._logits) :, : self._logits.shape[1]].clone()
        error = self._added.get(LOGITS)
        return Pass(
            values=self._seen,
            logits=own if error is None else own.double() + error,
            hidden=self._hidden[-len(self._logits) :],
        )

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        values = self._engine.values
        handles: list[Any] = []
        try:
            for name, module in self._model.named_modules():
                if Landmark(name, Part.OUTPUT) in values:
                    handles.append(module.register_forward_hook(self._after(name)))
                if Landmark(name, Part.INPUT) in values:
                    handles.append(module.register_forward_pre_hook(self._before(name)))
                if Landmark(name, Part.STREAM) in values:
                    handles.append(module.register_forward_pre_hook(self._before_norm(name), with_kwargs=True))
            head = self._model.get_output_embeddings()
            assert head is not None
            handles.append(head.register_forward_pre_hook(self._before_head))
            AttentionInterface.register(PACKED_ROWS, self._attention)
            yield
        finally:
            AttentionInterface.register(PACKED_ROWS, packed_rows_attention)
            for handle in handles:
                handle.remove()

    def _note(self, landmark: Landmark, own: Tensor) -> Tensor:
        """Note the trainer's value of a landmark, and return the value to go on with, in the same shape."""
        engine = self._engine.values.get(landmark)
        if engine is None or own.numel() % self._num:
            return own
        if own.dim() == 4 and own.shape[1] != self._num:  # (1, heads, T, channels)
            return self._note(landmark, own.transpose(1, 2).contiguous()).transpose(1, 2)
        flat = own.detach().reshape(self._num, -1)
        if flat.shape != engine.shape:
            self.mismatched.add(landmark)
            return own
        self._seen[landmark] = flat.clone()
        if self._forces:
            return engine.to(own, copy=True).reshape(own.shape)
        if landmark in self._added:
            return own + self._added[landmark].to(own).reshape(own.shape)
        return own

    def _after(self, name: str) -> Callable[..., Any]:
        landmark = Landmark(name, Part.OUTPUT)

        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            first = output[0] if isinstance(output, tuple) else output
            new = self._note(landmark, first)
            if not isinstance(output, tuple):
                return new
            return (new, *self._routed(name, first, output[1:]))

        return hook

    def _routed(self, name: str, logits: Tensor, rest: tuple[Any, ...]) -> tuple[Any, ...]:
        """Note the routes among the further outputs of a router, and put the engine's in their place."""
        engine = self._engine.routes.get(name)
        if engine is None or len(rest) != 2 or rest[1].dtype not in (torch.int64, torch.int32):
            return rest
        weights, engine_ids = (one.to(logits.device) for one in engine)
        experts = logits.shape[-1]
        is_sparse = rest[0].shape[-1] == rest[1].shape[-1]
        own = dense_routes(rest[0], rest[1], experts) if is_sparse else rest[0].reshape(self._num, -1).double()
        if own.shape[1] != experts or rest[1].numel() != engine_ids.numel():
            return rest
        landmark = Landmark(name, Part.ROUTES)
        self._seen[landmark] = own
        ids = rest[1].reshape(engine_ids.shape)
        if not is_sparse:
            return rest
        if self._forces:
            self._flipped[name] = (ids.sort(-1).values != engine_ids.sort(-1).values).any(-1, keepdim=True)
            return weights.to(rest[0]).reshape(rest[0].shape), engine_ids.to(rest[1]).reshape(rest[1].shape)
        if landmark in self._added:  # other weights are an error to add, other experts a choice to replace
            is_flipped = self._flipped[name]
            shifted = rest[0].reshape(ids.shape) + self._added[landmark].gather(1, ids.long()).to(rest[0])
            new_ids = torch.where(is_flipped, engine_ids.to(ids), ids)
            new = torch.where(is_flipped, weights.to(rest[0]), shifted)
            return new.reshape(rest[0].shape), new_ids.reshape(rest[1].shape)
        return rest

    def _before(self, name: str) -> Callable[..., Any]:
        landmark = Landmark(name, Part.INPUT)

        def hook(module: nn.Module, args: tuple[Any, ...]) -> Any:
            if not args or not isinstance(args[0], Tensor):
                return None
            return (self._note(landmark, args[0]), *args[1:])

        return hook

    def _before_norm(self, name: str) -> Callable[..., Any]:
        landmark = Landmark(name, Part.STREAM)

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states = args[0] if args else kwargs["hidden_states"]
            new = self._note(landmark, states)
            if new is not states:
                states.copy_(new)

        return hook

    def _before_head(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self._hidden = args[0].detach().reshape(self._num, -1)

    def _attention(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        """Compute attention, called by transformers."""
        name = self._names[module]
        if (scale := kwargs.pop("query_scale", None)) is not None:  # the engine's queries are scaled already
            query = (query * scale.at(self._packed.position_ids)[:, None]).to(query)

        def noted(states: Tensor, part: Part) -> Tensor:
            return self._note(Landmark(name, part), states.transpose(1, 2).contiguous()).transpose(1, 2)

        query, key, value = noted(query, Part.QUERY), noted(key, Part.KEY), noted(value, Part.VALUE)
        if self._is_reference:
            output = _plain_attention(module, query, key, value, **kwargs)
        else:
            output, _ = packed_rows_attention(module, query, key, value, mask, **kwargs)
        return self._note(Landmark(name, Part.ATTENTION), output), None


def _plain_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    sliding_window: int | None = None,
    chunk_size: int | None = None,
    packed: PackedBatch | None = None,
    **kwargs: Any,
) -> Tensor:
    """Compute attention by transformers' own formulas, with a mask, so that the truth is not the trainer's code."""
    eager = sys.modules[type(module).__module__].eager_attention_forward
    places = torch.arange(query.shape[2], device=query.device)
    distance = places[:, None] - places
    hidden = distance < 0
    if sliding_window is not None:
        hidden |= distance >= sliding_window
    if chunk_size is not None:
        hidden |= places[:, None] // chunk_size != places // chunk_size
    mask = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device)
    mask = mask.masked_fill(hidden, torch.finfo(query.dtype).min)
    return eager(module, query, key, value, mask[None, None], **kwargs)[0]


def dense_routes(weights: Tensor, ids: Tensor, experts: int) -> Tensor:
    """Return (T, experts) float64 weights from (T, k) weights and ids: 0 for experts that were not chosen."""
    ids = ids.reshape(-1, ids.shape[-1]).long()
    weights = weights.reshape(ids.shape).double()
    return weights.new_zeros(len(ids), experts).scatter_add_(1, ids, weights)
