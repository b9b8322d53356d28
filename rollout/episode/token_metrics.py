"""Agreement of training rows with the tokens that the engine sampled. Counts add up over rollouts and ranks.

    rollout/token_match_rate   trained positions whose id and logprob are the engine's own; anything below 1 is a bug
    rollout/trained_fraction   sampled tokens that are trained; below 1 only where calls were aborted
    rollout/extension_rate     calls beyond the first of their rollout that extend another call
    rollout/branch_rate        rollouts that need more than one row
    rollout/turns              calls per rollout

Without tokens, calls or rollouts, the first three are 1 and the last two are 0.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from lockstep.rollout.episode.rows import extension_count, is_trainable
from lockstep.rollout.records import EngineCall, TrainingRow


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
        return TokenCounts(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def metrics(self) -> dict[str, float]:
        return {
            "rollout/token_match_rate": self.matched / self.trained if self.trained else 1.0,
            "rollout/trained_fraction": self.trained / self.sampled if self.sampled else 1.0,
            "rollout/extension_rate": self.extensions / self.follow_ups if self.follow_ups else 1.0,
            "rollout/branch_rate": self.branched_rollouts / max(1, self.rollouts),
            "rollout/turns": self.calls / max(1, self.rollouts),
        }


def count_tokens(calls: Sequence[EngineCall], rows: Sequence[TrainingRow]) -> TokenCounts:
    """Compare the rows of one rollout with its calls, in the order that `TrainingRow.turns` refers to."""
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


def _num_matched(row: TrainingRow, calls: Sequence[EngineCall]) -> int:
    """Count the k-th trained tokens of a turn that equal the k-th token of the turn's call, logprob included.

    Positions are not compared, so that tokens still match after a context of another length (tokenized again).
    """
    positions = np.flatnonzero(row.loss_mask)
    positions = positions[np.argsort(row.turns[positions], kind="stable")]
    turns, counts = np.unique(row.turns[positions], return_counts=True)
    ids, logprobs, compared = array("q"), array("f"), []  # arrays are converted faster than tuples
    end = 0
    for turn, count in zip(turns.tolist(), counts.tolist(), strict=True):
        sampled_ids = calls[turn].sampled_ids[:count] if 0 <= turn < len(calls) else ()
        ids.extend(sampled_ids)
        logprobs.extend(calls[turn].sampled_logprobs[:count] if sampled_ids else ())
        compared.append(positions[end : end + len(sampled_ids)])
        end += count
    positions = np.concatenate([positions[:0], *compared])
    return int(((row.ids[positions] == ids) & (row.sampling_logprobs[positions] == logprobs)).sum())
