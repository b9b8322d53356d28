"""Rows of different lengths as one batch that no row can tell from being alone.

Padding is marked by a mask, never by an id: ids under it are set to 0, so nothing outside the vocabulary is embedded
and no embedding is resized, and a token that is equal to some padding token stays a token. Positions skip it:
`cumsum(mask) − mask`. Then how much padding there is, on which side, and who else is in the batch change nothing.

Source: seed 003, "Pad with a special padding token" and "Adjust position indices".
Shape legend: _B rows, _T padded length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class PaddedBatch(NamedTuple):
    ids_BT: Tensor
    """int64; 0 under padding."""
    mask_BT: Tensor
    """bool; true for tokens."""
    position_ids_BT: Tensor

    def to(self, device: torch.device | str) -> PaddedBatch:
        return PaddedBatch(*(tensor.to(device) for tensor in self))

    @property
    def last_B(self) -> Tensor:
        """Index of the last real token of each row."""
        return (torch.arange(self.mask_BT.shape[1], device=self.mask_BT.device) * self.mask_BT).argmax(1)


def pad(rows: Sequence[Sequence[int]], *, side: str = "right", length: int | None = None) -> PaddedBatch:
    """Pad rows of token ids to one length, by default that of the longest.

    Raises ValueError for an empty row (it has no last token), an unknown side, or rows that are longer than `length`.
    """
    if side not in ("left", "right"):
        raise ValueError(f"padding side {side!r}; expected left or right")
    if any(len(row) == 0 for row in rows):
        raise ValueError("a row without tokens cannot be scored; expected at least one token")
    width = max((len(row) for row in rows), default=0) if length is None else length
    ids_BT = torch.zeros(len(rows), width, dtype=torch.int64)
    mask_BT = torch.zeros(len(rows), width, dtype=torch.bool)
    for index, row in enumerate(rows):
        if len(row) > width:
            raise ValueError(f"row {index} has {len(row)} tokens, expected at most {width}")
        place = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        ids_BT[index, place] = torch.as_tensor(row, dtype=torch.int64)
        mask_BT[index, place] = True
    return PaddedBatch(ids_BT, mask_BT, position_ids(mask_BT))


def position_ids(mask_BT: Tensor) -> Tensor:
    """(B, T) how many tokens came before; a padding position repeats the position of the token that follows it."""
    count_BT = mask_BT.long()
    return count_BT.cumsum(1) - count_BT


def fixed_length(ids: Sequence[int], length: int) -> list[int]:
    """At most the first `length` ids: the cut of a fixed query length, whose padding `pad(..., length=)` adds."""
    return list(ids[:length])
