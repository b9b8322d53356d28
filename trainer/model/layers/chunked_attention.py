"""Attention of Llama 4: chunks of positions, and queries scaled by position, both counted from the start of a row.

transformers builds a mask of chunks for a whole input, and scales a query by its place in the input. In a pack both
would begin at the pack's first token. `adapt` makes each layer ask `packed_rows_attention` for them instead.

Source: transformers, models/llama4/modeling_llama4.py; "Scalable-Softmax Is Superior for Attention" (arXiv 2501.19399).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama4.modeling_llama4 import Llama4ForCausalLM, Llama4TextAttention

from lockstep.trainer.batch.packing import PackedBatch
from lockstep.trainer.batch.prefixes import Prefix

MODEL_TYPE = "llama4_text"
CHUNKED = "chunked_attention"
"""Layer type in transformers: a token sees the tokens of its own chunk of positions up to itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryScale:
    """Scale of a query at position p: 1 + slope · log(1 + floor((p + 1) / interval))."""

    slope: float
    interval: float
    """Positions over which the scale stays the same."""

    def at(self, position_ids: torch.Tensor) -> torch.Tensor:
        """Return float32 scales, in the shape of `position_ids`."""
        return torch.log1p(torch.floor((position_ids.float() + 1) / self.interval)) * self.slope + 1


def adapt(model: PreTrainedModel) -> None:
    """Make the attention layers of Llama 4 take chunks and scales from `packed_rows_attention`, in place; idempotent.

    Other models stay as they are.
    """
    if isinstance(model, Llama4ForCausalLM):
        model.base_model_prefix = "model"  # its class names the part of another checkpoint, so `get_decoder` fails
    for layer in model.modules():
        if not isinstance(layer, Llama4TextAttention):
            continue
        kinds, arguments = layer.config.layer_types, dict[str, Any]()
        assert kinds is not None, "the config fills them in"
        if kinds[layer.layer_idx] == CHUNKED:
            arguments["chunk_size"] = layer.config.attention_chunk_size
        if layer.attn_temperature_tuning and not layer.use_rope:
            layer.attn_temperature_tuning = False
            arguments["query_scale"] = QueryScale(slope=layer.attn_scale, interval=layer.floor_scale)
        if arguments:
            layer.register_forward_pre_hook(partial(_add_arguments, arguments), with_kwargs=True)


def plain_attributes(layer: nn.Module) -> dict[str, Any]:
    """Return the attributes of a layer that `adapt` has changed, as transformers sets them."""
    return (
        {"attn_temperature_tuning": layer.config.attn_temperature_tuning}
        if isinstance(layer, Llama4TextAttention)
        else {}
    )


def _add_arguments(
    arguments: dict[str, Any], layer: nn.Module, positional: tuple[Any, ...], by_name: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return positional, by_name | arguments


@lru_cache(maxsize=2)  # the layers of one pack ask in turn, in the backward pass again
def chunks(packed: PackedBatch, size: int) -> PackedBatch:
    """Return the pack with each stretch cut where a chunk of `size` positions ends; its attention is that of chunks.

    Only `row_lengths`, `cu_seqlens` and `prefixes` differ. A stretch that begins within a chunk keeps the part of its
    prefix that lies in this chunk.
    """
    prefixes = packed.prefixes or ((),) * packed.num_rows
    begins = [sum(length for _, length in prefix) for prefix in prefixes]
    lengths: list[int] = []
    chunk_prefixes: list[Prefix] = []
    first_piece: list[int] = []
    for length, begin, prefix in zip(packed.row_lengths, begins, prefixes, strict=True):
        first_piece.append(len(lengths))
        chunk_begin = begin // size * size
        part = []
        for earlier, shared in prefix:
            num_skipped = max(0, chunk_begin - begins[earlier])
            if shared > num_skipped:
                piece = first_piece[earlier] + (max(chunk_begin, begins[earlier]) // size - begins[earlier] // size)
                part.append((piece, shared - num_skipped))
        ends = [*range(chunk_begin + size, begin + length, size), begin + length]
        lengths += [end - start for start, end in zip([begin, *ends[:-1]], ends, strict=True)]
        chunk_prefixes += [tuple(part), *[()] * (len(ends) - 1)]
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=packed.cu_seqlens.dtype)
    return replace(
        packed,
        row_lengths=tuple(lengths),
        cu_seqlens=offsets.to(packed.cu_seqlens.device),
        prefixes=None if packed.prefixes is None else tuple(chunk_prefixes),
    )
