"""All rollouts of one step as training rows. On several ranks, rank 0 makes them (trainer/batch/dealt_batch.py).

Shape legend: _S delivered rollouts of the step, _K their turns, _N trained tokens of the step, _F reward functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lockstep.rewards.shaping import turn_rewards, turn_states
from lockstep.rollout.episode.prepared_calls import rows_of
from lockstep.rollout.errors import EvidenceError
from lockstep.rollout.records import Rollout, TrainingRow
from lockstep.trainer.batch.packing import StepLayout

if TYPE_CHECKING:
    from lockstep.trainer.batch.assignment import Plan, RankShare
    from lockstep.trainer.batch.teacher_scores import TeacherScores
    from lockstep.trainer.distributed.distributed import Distributed


@dataclass(frozen=True, kw_only=True, eq=False)
class StepBatch:
    """Rows and rollouts of one step, without failed rollouts, which are never trained."""

    rows: Sequence[TrainingRow]
    rollout_ids: np.ndarray  # (S,) int64, ascending
    group_S: np.ndarray  # (S,) int64
    rewards_S: np.ndarray  # (S,) float64
    is_kept_S: np.ndarray  # (S,) bool; False: masked, for instance because it was truncated
    greedy_rewards_S: np.ndarray  # (S,) float64 reward of the greedy answer to the same prompt; NaN: not sampled
    terms_SF: np.ndarray  # (S, F) float64 rewards by function, before the weights; NaN: it does not apply
    term_weights_F: np.ndarray  # (F,) float64 weights of the functions, which are in the order of their names
    num_turns_S: np.ndarray  # (S,) int64 engine calls, also those without trained tokens
    states_K: np.ndarray  # (K,) int64 state before each turn, equal where group and state are equal; -1: not asked for
    turn_rewards_K: np.ndarray  # (K,) float64, turns of all rollouts in order; those of a rollout add up to its reward
    teacher: TeacherScores | None = None

    def __post_init__(self) -> None:
        """Raise `EvidenceError` if the teacher's scores are of another number of tokens."""
        if self.teacher is not None and len(self.teacher.logp) != (num_trained := self.layout.num_tokens):
            raise EvidenceError(f"teacher: scores of {len(self.teacher.logp)} tokens, {num_trained} are trained")

    @classmethod
    def of(
        cls,
        rollouts: Sequence[Rollout],
        *,
        mask_truncated: bool,
        greedy_rewards: Mapping[int, float] | None = None,
        reward_weights: Mapping[str, float] | None = None,
        with_turn_rewards: bool = False,
        with_states: bool = False,
        with_routes: bool = False,
    ) -> StepBatch:
        """Make the rows of the trainable rollouts of a step.

        Args:
            mask_truncated: True masks rollouts that ended on a length limit.
            greedy_rewards: by group id.
            reward_weights: of reward functions by name; 1 for those left out.
            with_turn_rewards: False gives the last turn the whole reward.
            with_states: number the states before turns (`rewards.shaping.turn_states`).
            with_routes: keep the engine's routes, which all rows must have; False leaves them out.

        Raises:
            EvidenceError: only some rows carry their sampling support; the ratios of the others would be over another.
                Or a row lacks the engine's routes, or rows have routes of different models.
        """
        greedy = greedy_rewards or {}
        delivered_rollouts = sorted((r for r in rollouts if r.is_trainable), key=lambda rollout: rollout.rollout_id)
        rows = tuple(row for rollout in delivered_rollouts for row in rows_of(rollout))
        num_supports = sum(row.support is not None for row in rows)
        if 0 < num_supports < len(rows):
            raise EvidenceError(f"{num_supports} of {len(rows)} rows carry the sampling support; expected all or none")
        if with_routes:
            _check_routes(rows)
        else:
            rows = tuple(row if row.routes is None else replace(row, routes=None) for row in rows)
        names = sorted({name for rollout in delivered_rollouts for name in rollout.rewards})
        weights = reward_weights or {}
        states: dict[Any, int] = {}
        numbers = [
            states.setdefault((rollout.group_id, state), len(states)) if with_states else -1
            for rollout in delivered_rollouts
            for state in (turn_states(rollout) if with_states else rollout.calls)
        ]
        by_turn = [turn_rewards(rollout, reported=with_turn_rewards) for rollout in delivered_rollouts]
        return cls(
            rows=rows,
            rollout_ids=np.array([rollout.rollout_id for rollout in delivered_rollouts], dtype=np.int64),
            group_S=np.array([rollout.group_id for rollout in delivered_rollouts], dtype=np.int64),
            rewards_S=np.array([rollout.reward for rollout in delivered_rollouts], dtype=np.float64),
            is_kept_S=np.array(
                [not (mask_truncated and rollout.is_cut_off) for rollout in delivered_rollouts], dtype=np.bool_
            ),
            greedy_rewards_S=np.array(
                [greedy.get(rollout.group_id, np.nan) for rollout in delivered_rollouts], dtype=np.float64
            ),
            terms_SF=np.array(
                [[rollout.rewards.get(name, np.nan) for name in names] for rollout in delivered_rollouts],
                dtype=np.float64,
            ).reshape(len(delivered_rollouts), len(names)),
            term_weights_F=np.array([weights.get(name, 1.0) for name in names], dtype=np.float64),
            num_turns_S=np.array([len(rewards) for rewards in by_turn], dtype=np.int64),
            states_K=np.array(numbers, dtype=np.int64),
            turn_rewards_K=np.concatenate([np.zeros(0), *by_turn]),
        )

    @cached_property
    def layout(self) -> StepLayout:
        return StepLayout.of(self.rows, self.rollout_ids.tolist())

    @cached_property
    def row_lengths(self) -> np.ndarray:
        """(rows,) int64 tokens of each row."""
        return np.array([len(row) for row in self.rows], dtype=np.int64)

    @property
    def num_rollouts(self) -> int:
        return len(self.rollout_ids)

    @cached_property
    def rollout_N(self) -> torch.Tensor:
        counts = np.diff(self.layout.token_start)
        return torch.from_numpy(np.repeat(self.layout.rollout_index, counts))

    @cached_property
    def sampling_logprobs_N(self) -> torch.Tensor:
        return self._trained("sampling_logprobs")

    @cached_property
    def versions_N(self) -> torch.Tensor:
        return self._trained("versions").long()

    @cached_property
    def turns_N(self) -> torch.Tensor:
        return self._trained("turns").long()

    @cached_property
    def turn_rollout_K(self) -> torch.Tensor:
        """(K,) int64 rollouts of turns."""
        return torch.from_numpy(np.repeat(np.arange(self.num_rollouts), self.num_turns_S))

    @cached_property
    def turn_index_K(self) -> torch.Tensor:
        """(K,) int64 numbers of turns within their rollouts."""
        return torch.from_numpy(np.concatenate([np.zeros(0, int), *map(np.arange, self.num_turns_S)]))

    def share(self, make: Callable[[], Plan], distributed: Distributed) -> RankShare:
        """Return this rank's share of the plan that `make` makes. Afterwards this rank has the rows of its share.

        A collective, if the rows of the step are dealt to ranks.
        """
        return make().share(distributed.rank)

    def with_routes(self, routes: Mapping[int, np.ndarray], distributed: Distributed) -> StepBatch:
        """Return the batch with other routes; a collective, if the rows of the step are dealt to ranks.

        routes: (tokens, layers, k) by row index, of the rows that this rank has computed.
        """
        return replace(self, rows=tuple(replace(row, routes=routes[index]) for index, row in enumerate(self.rows)))

    def _trained(self, name: str) -> torch.Tensor:
        parts = [getattr(row, name)[row.loss_mask] for row in self.rows]
        return torch.from_numpy(np.concatenate(parts)) if parts else torch.zeros(0)


def _check_routes(rows: Sequence[TrainingRow]) -> None:
    """Raise `EvidenceError` unless all rows carry routes of one model."""
    row_routes = [row.routes for row in rows if row.routes is not None]
    if len(row_routes) < len(rows):
        raise EvidenceError(
            f"{len(rows) - len(row_routes)} of {len(rows)} rows have no routed experts of the engine; sample them with "
            "correction.routing_replay=engine, or set correction.routing_replay=off"
        )
    profiles = {(routes.dtype.name, *routes.shape[1:]) for routes in row_routes}
    if len(profiles) > 1:
        raise EvidenceError(
            f"rows have routes of several models: (dtype, layers, experts per token) {sorted(profiles)}"
        )
