"""Check at the start of a run that the rows of a pack cannot see each other.

Two short rows are scored in one pack, alone, and beside a row with other tokens; then a short one beside a long one,
which passes the windows, chunks and original lengths of the model (distances.py). A model in which state passes from
row to row, or that computes a pack by its longest row, trains on wrong log-probabilities without any error, so it is
refused. The check runs on the model as it is trained: its attention kernels, its adapters, its shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lockstep.rollout.errors import ConfigError
from lockstep.trainer.batch.packing import PackedBatch, collate, whole_row

FIRST, SECOND = tuple(range(4, 23)), tuple(range(40, 29, -1))
"""Rows of different lengths, neither a multiple of the chunks in which recurrent kernels compute."""
OTHER_FIRST, OTHER_SECOND = FIRST[::-1], SECOND[::-1]

Score = Callable[[PackedBatch], torch.Tensor]
"""Scores of the trained tokens of a pack, (outputs, T): log-probabilities, and values if there is a critic."""


def leak(score: Score, *, vocab_size: int, length: int, device: torch.device | str) -> float:
    """Return the mean change of a token's score by what else is in its pack, 0 up to rounding for isolated rows.

    A collective under ZeRO-3. The model needs at least two token ids. length: of the long row, whose tokens count by
    the median of each quarter, because routers round more of them to other experts.
    """

    def scores(*rows: Sequence[int]) -> list[torch.Tensor]:
        packed_rows = [whole_row([token % vocab_size for token in row]) for row in rows]
        packed = collate(packed_rows, range(len(rows)), device=device)
        with torch.no_grad():
            output = score(packed).float()
        return list(output.split([len(row) - 1 for row in rows], -1))

    long = torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    first, second = scores(FIRST, SECOND)
    beside, after = scores(FIRST, long)
    changes = [
        first - scores(FIRST)[0],
        second - scores(SECOND)[0],
        first - scores(FIRST, OTHER_SECOND)[0],
        second - scores(OTHER_FIRST, SECOND)[1],
        first - beside,
    ]
    medians = [part.abs().median() for part in (after - scores(long)[0]).chunk(4, -1)]
    return max(float(change) for change in (*(change.abs().mean() for change in changes), *medians))


def check(
    score: Score, *, vocab_size: int, length: int, name: str, dtype: torch.dtype, device: torch.device | str
) -> None:
    """Raise `ConfigError` if rows of a pack change each other's scores. name: class of the model, for the error.

    dtype: of the computation. In half precision kernels round other lengths in other ways, so the bound is wider; the
    least leak of the recurrent layers tested is 0.04.
    """
    bound = 1e-3 if dtype in (torch.float32, torch.float64) else 0.03
    delta = leak(score, vocab_size=vocab_size, length=length, device=device)
    if not delta <= bound:
        raise ConfigError(
            f"{name}: rows of a pack change each other's scores by {delta:.2g} on average, expected at most {bound:g}. "
            "It has layers that carry a state from one row to the next and that Lockstep cannot keep apart; set "
            "model.path to a model of a family in docs/models.md"
        )
