"""Causal attention within the rows of a pack as one kernel per layer, on NVIDIA GPUs in half precision.

torch's variable-length FlashAttention has separate offsets for queries and keys. So the queries of a row are those of
its own stretch, its keys are those of its prefix followed by its own, and rows that share a prefix
(trainer/batch/prefixes.py) still compute it once. The last query of a row belongs to its last key.

Not covered: softcapped scores and attention sinks, which the kernel does not have (`packed_attention.py` writes them
out), and GPUs before Ampere.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn

from lockstep.trainer.batch.packing import PackedBatch

AMPERE = (8, 0)
"""Least compute capability of the kernel."""
MULTIPLE, MAX_HEAD_DIM = 8, 256
"""Widths of heads that the kernel takes: multiples up to the largest one."""


def has_kernel(device: torch.device) -> bool:
    """Return True if the kernel runs on this device."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= AMPERE


def can_compute(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Return True if the kernel takes tensors of this dtype, these head widths and this device."""
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    return is_half and _width(query, value) <= MAX_HEAD_DIM and has_kernel(query.device)


def _width(query: torch.Tensor, value: torch.Tensor) -> int:
    """Return the width to which heads are padded: the wider of the two, as a multiple that the kernel takes."""
    return -(-max(query.shape[-1], value.shape[-1]) // MULTIPLE) * MULTIPLE


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLayout:
    """Where the keys of each row lie in the pack."""

    index: torch.Tensor | None
    """(K,) int64 positions of all keys, row after row; None: nothing is shared, and they are the pack itself."""
    offsets: torch.Tensor
    """(R + 1,) int32: the keys of row r are `[offsets[r], offsets[r + 1])`."""
    max_queries: int
    max_keys: int


@lru_cache(maxsize=2)  # the layers of one pack ask in turn, in the backward pass again
def key_layout(packed: PackedBatch) -> KeyLayout:
    lengths = packed.row_lengths
    if packed.prefixes is None:
        return KeyLayout(index=None, offsets=packed.cu_seqlens, max_queries=max(lengths), max_keys=max(lengths))
    starts = [0, *accumulate(lengths)]
    spans = [
        [*((starts[earlier], length) for earlier, length in prefix), (starts[row], lengths[row])]
        for row, prefix in enumerate(packed.prefixes)
    ]
    num_keys = [sum(length for _, length in row) for row in spans]
    index = torch.cat([torch.arange(start, start + length) for row in spans for start, length in row])
    offsets = torch.tensor([0, *accumulate(num_keys)], dtype=torch.int32)
    device = packed.cu_seqlens.device
    return KeyLayout(
        index=index.to(device), offsets=offsets.to(device), max_queries=max(lengths), max_keys=max(num_keys)
    )


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packed: PackedBatch,
    *,
    scaling: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    """Compute the attention of a pack; arguments as `packed_rows_attention`.

    Returns:
        (1, L, heads, head_dim), as wide as `value`.
    """
    layout, width = key_layout(packed), _width(query, value)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling  # of the heads without padding
    # Latent attention has wider queries and keys than values.
    padded_states = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (query, key, value))
    q, k, v = (states[0].transpose(0, 1) for states in padded_states)
    if layout.index is not None:
        k, v = k.index_select(0, layout.index), v.index_select(0, layout.index)
    output = varlen_attn(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        packed.cu_seqlens,
        layout.offsets,
        layout.max_queries,
        layout.max_keys,
        scale=scale,
        # torch counts the tokens to the left of a query's own; -1: all of them.
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    assert isinstance(output, torch.Tensor), "without auxiliary outputs"
    return output[None, ..., : value.shape[-1]]
