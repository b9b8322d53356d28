"""Causal attention within the rows of a pack, registered with transformers as the implementation `packed_rows`.

On NVIDIA GPUs in half precision, under autocast too, it is one kernel per layer
(trainer/model/layers/varlen_attention.py). Elsewhere, mainly on CPU, it is one causal SDPA call per row, on slices of
the pack. No mask is built and no work crosses rows. On CPU with 64 rows, a block-diagonal mask over the pack was 35 to
47 times slower (and takes L² memory); right-padded batches of similar lengths were 1.6 to 2.5 times slower.

If rows share prefixes (trainer/batch/prefixes.py), a row's call has the queries of its own stretch, and its keys are
preceded by those of its prefix, which other rows have computed.

Covered: grouped-query heads, sliding windows, softcapped scores (Gemma 2), attention sinks (gpt-oss), chunks and scaled
queries (Llama 4), images whose tokens see all of their image (Gemma 3).
Not covered: other non-causal attention, position biases, attention dropout (the policy has none).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lockstep.trainer.batch.packing import PackedBatch
from lockstep.trainer.batch.prefixes import Prefix
from lockstep.trainer.model.layers import autocast, varlen_attention

if TYPE_CHECKING:
    from lockstep.trainer.model.layers.chunked_attention import QueryScale

PACKED_ROWS = "packed_rows"
"""Name of the implementation in transformers' registry (`attn_implementation`)."""

LONG_STRETCH = 2
"""Stretch length, in multiples of its prefix, above which recomputing the prefix as a whole causal row is faster than
a mask, under which the kernel skips nothing. Measured on CPU: 0.8 of the time at a multiple of 4, 1.2 at 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Settings of a layer's scores, under the names of transformers."""

    scaling: float | None
    """Factor; None: head_dim ** -0.5."""
    sliding_window: int | None
    """A token sees itself and the `sliding_window - 1` tokens before it."""
    softcap: float | None
    """Scores become softcap · tanh(score / softcap)."""
    s_aux: torch.Tensor | None
    """(heads,) logit of the attention sink, which takes probability but has no value."""

    @property
    def are_written_out(self) -> bool:
        """True if no kernel of SDPA computes them."""
        return self.softcap is not None or self.s_aux is not None


def register() -> None:
    """Register `packed_rows` with transformers; idempotent."""
    if PACKED_ROWS in AttentionInterface().valid_keys():
        return
    AttentionInterface.register(PACKED_ROWS, packed_rows_attention)
    # Calls without packed rows (generation, plain batches) get the ordinary SDPA mask.
    AttentionMaskInterface.register(PACKED_ROWS, sdpa_mask)


def hide_from_compiler() -> None:
    """Exclude `packed_rows` from compilation: traced, it would be recompiled for every number of rows."""
    AttentionInterface.register(PACKED_ROWS, torch.compiler.disable(packed_rows_attention))


_packs: Any = WeakTensorKeyDictionary()
"""Pack of each mask in use, for models that do not pass `packed` on to their attention (StableLM, Nemotron)."""


def no_mask(packed: PackedBatch) -> torch.Tensor:
    """Return an empty 4-D mask. transformers passes 4-D masks through, so it builds no L × L mask for the pack.

    A model that passes neither it nor `packed` on to its attention fails instead of letting rows see each other.
    """
    mask = torch.empty(1, 1, 0, 0, dtype=torch.bool, device=packed.ids.device)
    _packs[mask] = packed
    return mask


def packed_rows_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed: PackedBatch | None = None,
    chunk_size: int | None = None,
    query_scale: QueryScale | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention; the signature is the one that transformers calls.

    Args:
        query: (1, heads, L, head_dim); key and value: (1, kv_heads, L, head_dim).
        attention_mask: `no_mask()` for packs; bool or None for plain batches.
        packed: the pack, of which only `row_lengths`, `prefixes` and the blocks of its images are read. The whole
            object is passed because a compiled layer would be recompiled for each tuple of lengths. None: a plain
            batch, which goes to transformers' own SDPA if that supports it.
        chunk_size: a token sees the tokens of its own chunk of this many positions up to itself; the mask of a plain
            batch already says so.
        query_scale: factor of each query by its position in its row.
        dropout: must be 0 for packs.
        kwargs: those of `Scores`, and further arguments of transformers, which plain batches alone use.

    Returns:
        (1, L, heads, head_dim) and None (no attention weights).
    """
    if packed is None and attention_mask is not None:
        packed = _packs.get(attention_mask)
    if query_scale is not None:
        places = torch.arange(query.shape[2], device=query.device) if packed is None else packed.position_ids
        query = (query * query_scale.at(places)[:, None]).to(query.dtype)
    if packed is not None and chunk_size is not None:
        from lockstep.trainer.model.layers.chunked_attention import chunks  # other models do not load it

        packed = chunks(packed, chunk_size)
    scores = Scores(**{field.name: kwargs.pop(field.name, None) for field in fields(Scores)})
    scaling, sliding_window, written_out = scores.scaling, scores.sliding_window, scores.are_written_out
    if packed is None:
        if not written_out:
            return sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
            )
        keep = _band(query.shape[2], key.shape[2], None, query.device) if attention_mask is None else attention_mask
        output = _explicit(query, key, value, keep, scores)
        return output.transpose(1, 2).contiguous(), None

    assert query.shape[:3:2] == (1, packed.num_tokens), "row lengths must add up to the pack"
    assert dropout == 0.0, "the policy has no dropout"
    query, key, value = autocast.cast(query, key, value)  # norms and rotations widen them, and kernels take half
    blocks = () if packed.images is None else packed.images.blocks
    if not (written_out or blocks) and varlen_attention.can_compute(query, value):
        return (
            varlen_attention.varlen_attention(
                query, key, value, packed, scaling=scaling, sliding_window=sliding_window
            ),
            None,
        )
    lengths = list(packed.row_lengths)
    gqa = query.shape[1] != key.shape[1]
    queries, keys, values = (states.split(lengths, 2) for states in (query, key, value))
    outputs = []
    end = 0
    for row, prefix in enumerate(packed.prefixes or ((),) * packed.num_rows):
        q, k, v = queries[row], _behind(prefix, keys, row), _behind(prefix, values, row)
        own = q.shape[2]
        start, end = end, end + own
        own_blocks = [(first - start, last - start) for first, last in blocks if start <= first < end]
        is_windowed = sliding_window is not None and sliding_window < k.shape[2]
        needs_mask = is_windowed or written_out or len(own_blocks) > 0
        recomputes_prefix = own > LONG_STRETCH * (k.shape[2] - own) and not needs_mask
        if recomputes_prefix:
            q = _behind(prefix, queries, row)
        is_masked = needs_mask or (len(prefix) > 0 and not recomputes_prefix)
        keep = _band(q.shape[2], k.shape[2], sliding_window, q.device, own_blocks) if is_masked else None
        if written_out and keep is not None:
            outputs.append(_explicit(q, k, v, keep, scores))
        else:
            expands = gqa and keep is not None and q.is_cuda  # CUDA's kernels take a mask or grouped heads, not both
            if expands:
                k, v = (states.repeat_interleave(q.shape[1] // k.shape[1], 1) for states in (k, v))
            output = F.scaled_dot_product_attention(
                q, k, v, keep, is_causal=keep is None, scale=scaling, enable_gqa=gqa and not expands
            )
            outputs.append(output[:, :, -own:])
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None


def _behind(prefix: Prefix, stretches: Sequence[torch.Tensor], row: int) -> torch.Tensor:
    """Return the keys, values or queries of a row: those of its prefix, followed by those of its own stretch."""
    if not prefix:
        return stretches[row]
    return torch.cat([*(stretches[earlier][:, :, :length] for earlier, length in prefix), stretches[row]], 2)


def _band(
    queries: int, keys: int, window: int | None, device: torch.device, blocks: Sequence[tuple[int, int]] = ()
) -> torch.Tensor:
    """Return a (queries, keys) bool mask, True where a query sees a key: causal, and within the window if given. The
    queries belong to the last keys. blocks: [first, end) of queries that see each other."""
    before = keys - queries
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(before)
    for first, end in blocks:
        mask[first:end, before + first : before + end] = True
    return mask if window is None else mask.triu(before + 1 - window)


def _explicit(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keep: torch.Tensor, settings: Scores
) -> torch.Tensor:
    """Compute attention without a kernel, (B, heads, Q, head_dim), softmax in float32 or wider. keep: as `_band`."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scaling, softcap, s_aux = settings.scaling, settings.softcap, settings.s_aux
    scores = (query @ key.transpose(2, 3)) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~keep, torch.finfo(scores.dtype).min)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1).to(scores)], -1)
    weights = torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return weights[..., : key.shape[2]].to(query.dtype) @ value
