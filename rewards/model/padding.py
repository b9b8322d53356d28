"""Right padding of token rows such that a row's result does not depend on the other rows of its batch.

A mask marks the padding, never an id: ids under it are 0, so that nothing outside the vocabulary is embedded and a
sampled token with the id of a padding token stays a token. Position ids skip the padding: `cumsum(mask) - mask`.

Source: "The N Implementation Details of RLHF with PPO" (Hugging Face blog, 2023), "Pad with a special padding token"
and "Adjust position indices".
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
    """bool; True for tokens."""
    position_ids_BT: Tensor

    def to(self, device: torch.device | str) -> PaddedBatch:
        return PaddedBatch(*(tensor.to(device) for tensor in self))

    @property
    def last_B(self) -> Tensor:
        """Index of the last token of each row that is not padding."""
        return (torch.arange(self.mask_BT.shape[1], device=self.mask_BT.device) * self.mask_BT).argmax(1)


def pad(rows: Sequence[Sequence[int]]) -> PaddedBatch:
    """Pad rows of token ids on the right to the length of the longest. Raises ValueError for an empty row, which has no
    last token."""
    if any(len(row) == 0 for row in rows):
        raise ValueError("a row without tokens cannot be scored; expected at least one token")
    width = max(map(len, rows), default=0)
    ids_BT = torch.zeros(len(rows), width, dtype=torch.int64)
    mask_BT = torch.zeros(len(rows), width, dtype=torch.bool)
    for index, row in enumerate(rows):
        ids_BT[index, : len(row)] = torch.as_tensor(row, dtype=torch.int64)
        mask_BT[index, : len(row)] = True
    return PaddedBatch(ids_BT, mask_BT, position_ids(mask_BT))


def position_ids(mask_BT: Tensor) -> Tensor:
    """Return the number of tokens before each position, (B, T); padding has that of the token that follows it."""
    count_BT = mask_BT.long()
    return count_BT.cumsum(1) - count_BT
