"""Training rows against the record: is every sampled token trained, with its own id and its own logprob?

The record is the calls of a rollout, the engine's own words. This needs no model and no tolerance: a row that was made
by rule (docs/tokens.md) agrees exactly, so anything below 1.0 is a bug, however small the divergence that it causes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rollout.episode.rows import is_trainable
from rollout.records import Rollout, TrainingRow


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMatch:
    """Counts of tokens over some rollouts."""

    sampled: int = 0
    """In the record."""
    trained: int = 0
    """In the rows."""
    same_id: int = 0
    """Trained tokens whose id is the engine's at that place of its turn."""
    same: int = 0
    """Of these, the ones whose logprob is the engine's too."""
    lost_ends: int = 0
    """Sampled tokens that are missing at the end of turns whose beginning is right."""

    @property
    def match_rate(self) -> float:
        """Share of trained tokens whose id and logprob are the engine's own; 1 without any."""
        return self.same / self.trained if self.trained else 1.0

    @property
    def id_match_rate(self) -> float:
        return self.same_id / self.trained if self.trained else 1.0

    @property
    def coverage(self) -> float:
        """Trained over sampled tokens."""
        return self.trained / self.sampled if self.sampled else 1.0

    @property
    def is_exact(self) -> bool:
        return self.sampled == self.trained == self.same

    def __add__(self, other: TokenMatch) -> TokenMatch:
        return TokenMatch(
            sampled=self.sampled + other.sampled,
            trained=self.trained + other.trained,
            same_id=self.same_id + other.same_id,
            same=self.same + other.same,
            lost_ends=self.lost_ends + other.lost_ends,
        )


def match(rollouts: Iterable[Rollout], rows: Sequence[TrainingRow]) -> TokenMatch:
    """Compare the trained tokens of rows with what the calls of their rollouts sampled, turn by turn and in order."""
    total = TokenMatch()
    for rollout in rollouts:
        own = [row for row in rows if row.rollout_id == rollout.rollout_id]
        for turn, call in enumerate(rollout.calls):
            if not is_trainable(call):
                continue
            ids, logprobs = _trained_in_turn(own, turn)
            total += _match_turn(
                np.array(call.sampled_ids), np.array(call.sampled_logprobs, dtype=np.float32), ids, logprobs
            )
    return total


def _trained_in_turn(rows: Sequence[TrainingRow], turn: int) -> tuple[np.ndarray, np.ndarray]:
    places = [(row, row.loss_mask & (row.turns == turn)) for row in rows]
    return (
        np.concatenate([np.zeros(0, dtype=np.int64), *(row.ids[inside] for row, inside in places)]),
        np.concatenate([np.zeros(0, dtype=np.float32), *(row.sampling_logprobs[inside] for row, inside in places)]),
    )


def _match_turn(
    sampled_ids: np.ndarray, sampled_logprobs: np.ndarray, ids: np.ndarray, logprobs: np.ndarray
) -> TokenMatch:
    both = min(len(sampled_ids), len(ids))
    same_id = sampled_ids[:both] == ids[:both]
    same = same_id & (sampled_logprobs[:both] == logprobs[:both])
    return TokenMatch(
        sampled=len(sampled_ids),
        trained=len(ids),
        same_id=int(same_id.sum()),
        same=int(same.sum()),
        lost_ends=len(sampled_ids) - both if same_id.all() else 0,
    )
