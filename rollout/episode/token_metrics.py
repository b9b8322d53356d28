"""How exactly the training rows hold what the engine sampled. Counts add up over rollouts and ranks, shares do not.

    rollout/token_match_rate   trained positions whose id and logprob are the engine's own; anything below 1 is a bug
    rollout/trained_fraction   sampled tokens that are trained; below 1 only where calls were aborted
    rollout/extension_rate     calls, of those that could, that extend an earlier call of their rollout
    rollout/branch_rate        rollouts that need more than one row
    rollout/turns              calls per rollout

A share of nothing is 1 for the first three (nothing went wrong) and 0 for the last two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from rollout.episode.rows import extension_count, is_trainable
from rollout.records import EngineCall, TrainingRow


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    rollouts: int = 0
    branched_rollouts: int = 0
    calls: int = 0
    follow_ups: int = 0
    """Calls beyond the first of each rollout, aborted and empty ones left out."""
    extensions: int = 0
    sampled: int = 0
    """Tokens that the engine sampled, those of aborted calls included."""
    trained: int = 0
    matched: int = 0

    def __add__(self, other: TokenCounts) -> TokenCounts:
        sums = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        return TokenCounts(**sums)

    def metrics(self) -> dict[str, float]:
        return {
            "rollout/token_match_rate": _share(self.matched, self.trained, of_nothing=1.0),
            "rollout/trained_fraction": _share(self.trained, self.sampled, of_nothing=1.0),
            "rollout/extension_rate": _share(self.extensions, self.follow_ups, of_nothing=1.0),
            "rollout/branch_rate": _share(self.branched_rollouts, self.rollouts, of_nothing=0.0),
            "rollout/turns": _share(self.calls, self.rollouts, of_nothing=0.0),
        }


def count_tokens(calls: Sequence[EngineCall], rows: Sequence[TrainingRow]) -> TokenCounts:
    """Compare the rows of one rollout with its calls, given in the order that `TrainingRow.turns` refers to."""
    trainable = sum(is_trainable(call) for call in calls)
    return TokenCounts(
        rollouts=1,
        branched_rollouts=int(len(rows) > 1),
        calls=len(calls),
        follow_ups=max(0, trainable - 1),
        extensions=extension_count(calls),
        sampled=sum(len(call.sampled_ids) for call in calls),
        trained=sum(row.num_trained for row in rows),
        matched=sum(_num_matched(row, calls) for row in rows),
    )


def token_metrics(calls: Sequence[EngineCall], rows: Sequence[TrainingRow]) -> dict[str, float]:
    """The metrics of one rollout."""
    return count_tokens(calls, rows).metrics()


def _num_matched(row: TrainingRow, calls: Sequence[EngineCall]) -> int:
    """The k-th trained token of a turn is compared with the k-th token that the turn's call sampled.

    By rank and not by position, so that a context of another length (tokenised again) does not hide what matches.
    """
    matched = 0
    for turn in np.unique(row.turns[row.loss_mask]).tolist():
        if not 0 <= turn < len(calls):
            continue
        positions = np.flatnonzero(row.loss_mask & (row.turns == turn))
        ids = np.asarray(calls[turn].sampled_ids, dtype=np.int64)
        logprobs = np.asarray(calls[turn].sampled_logprobs, dtype=np.float32)
        count = min(len(positions), len(ids))
        is_same_id = row.ids[positions[:count]] == ids[:count]
        is_same_logprob = row.sampling_logprobs[positions[:count]] == logprobs[:count]
        matched += int((is_same_id & is_same_logprob).sum())
    return matched


def _share(part: int, whole: int, *, of_nothing: float) -> float:
    return part / whole if whole else of_nothing
