"""All rollouts of one step as training rows, the same on every rank.

The rank that drives the engines makes the rows and broadcasts them. They are small (about 20 bytes a token), and so all
ranks compute everything that is counted or normalized over the step (denominators, advantages, correction weights and
their metrics) from the same numbers. No partition of the work can change it.

Shape legend: _S delivered rollouts of the step, _K their turns, _N trained tokens of the step, _F reward functions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.numpy
import torch

from lockstep.rewards.shaping import turn_rewards, turn_states
from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.errors import EvidenceError
from lockstep.rollout.records import ImageSpan, Rollout, SamplingSupport, TrainingRow
from lockstep.trainer.batch.packing import StepLayout

if TYPE_CHECKING:  # of runs with a teacher
    from lockstep.trainer.batch.teacher_scores import TeacherScores

ROW_ARRAYS = {
    "ids": np.int64,
    "loss_mask": np.bool_,
    "sampling_logprobs": np.float32,
    "versions": np.int32,
    "turns": np.int32,
}


@dataclass(frozen=True, kw_only=True, eq=False)
class StepBatch:
    """Rows and rollouts of one step, without failed rollouts, which are never trained."""

    rows: tuple[TrainingRow, ...]
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
        num_trained = sum(row.num_trained for row in self.rows)
        if self.teacher is not None and len(self.teacher.logp) != num_trained:
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
        rows = tuple(
            row
            for rollout in delivered_rollouts
            for row in rows_from_calls(rollout.calls, rollout_id=rollout.rollout_id, group_id=rollout.group_id)
        )
        num_supports = sum(row.support is not None for row in rows)
        if 0 < num_supports < len(rows):
            raise EvidenceError(f"{num_supports} of {len(rows)} rows carry the sampling support; expected all or none")
        if with_routes:
            _check_routes(rows)
        else:
            rows = tuple(replace(row, routes=None) for row in rows)
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

    def with_routes(self, routes: np.ndarray) -> StepBatch:
        """Return the batch with other routes. routes: (tokens, layers, k) of all tokens of its rows, in order."""
        bounds = pairwise(np.cumsum([0, *map(len, self.rows)]))
        of_rows = zip(self.rows, bounds, strict=True)
        return replace(self, rows=tuple(replace(row, routes=routes[start:end]) for row, (start, end) in of_rows))

    def _trained(self, name: str) -> torch.Tensor:
        parts = [getattr(row, name)[row.loss_mask] for row in self.rows]
        return torch.from_numpy(np.concatenate(parts)) if parts else torch.zeros(0)


def encode(batch: StepBatch) -> bytes:
    """Serialize a batch for `decode` as safetensors, which runs no code when it is read."""
    arrays = _row_arrays(batch.rows) | {name: getattr(batch, name) for name in _batch_arrays()}
    return safetensors.numpy.save(arrays if batch.teacher is None else arrays | batch.teacher.arrays())


def decode(payload: bytes) -> StepBatch:
    arrays = safetensors.numpy.load(payload)
    teacher = None
    if any(name.startswith("teacher_") for name in arrays):  # `teacher_scores.PREFIX`
        from lockstep.trainer.batch.teacher_scores import TeacherScores  # runs without a teacher do not load it

        teacher = TeacherScores.from_arrays(arrays)
    return StepBatch(
        rows=tuple(_rows(arrays)),
        teacher=teacher,
        **{name: arrays[name] for name in _batch_arrays()},
    )


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


def _batch_arrays() -> list[str]:
    return [field.name for field in fields(StepBatch) if field.name not in ("rows", "teacher")]


def _row_arrays(rows: Sequence[TrainingRow]) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {
        name: np.concatenate([np.asarray(getattr(row, name), dtype=dtype) for row in rows] or [np.zeros(0, dtype)])
        for name, dtype in ROW_ARRAYS.items()
    }
    arrays |= {
        "row_lengths": np.array([len(row) for row in rows], dtype=np.int64),
        "row_rollout": np.array([row.rollout_id for row in rows], dtype=np.int64),
        "row_group": np.array([row.group_id for row in rows], dtype=np.int64),
    }
    supports = [row.support for row in rows if row.support is not None]
    if supports:
        arrays["support_sizes"] = np.concatenate([np.diff(support.offsets) for support in supports])
        arrays["support_ids"] = np.concatenate([support.token_ids for support in supports])
    routes = [row.routes for row in rows if row.routes is not None]
    if routes:
        arrays["routes"] = np.concatenate(routes)
        arrays["route_counts"] = np.array(list(map(len, routes)), dtype=np.int64)
    spans = [(index, span) for index, row in enumerate(rows) for span in row.images]
    if spans:
        arrays["image_spans"] = np.array([(index, span.start, span.end) for index, span in spans], dtype=np.int64)
        digests = b"".join(bytes.fromhex(span.digest) for _, span in spans)
        arrays["image_digests"] = np.frombuffer(digests, dtype=np.uint8).reshape(len(spans), -1)
    return arrays


def _rows(arrays: dict[str, np.ndarray]) -> list[TrainingRow]:
    bounds = np.concatenate([[0], np.cumsum(arrays["row_lengths"])])
    trained_bounds = np.concatenate([[0], np.cumsum(arrays["loss_mask"])])[bounds]
    sizes = arrays.get("support_sizes")
    support_bounds = None if sizes is None else np.concatenate([[0], np.cumsum(sizes)])
    routes = arrays.get("routes")
    route_bounds = np.concatenate([[0], np.cumsum(arrays.get("route_counts", []), dtype=np.int64)])
    images: dict[int, list[ImageSpan]] = defaultdict(list)
    for (index, start, end), digest in zip(
        arrays.get("image_spans", np.zeros((0, 3), np.int64)).tolist(), arrays.get("image_digests", ()), strict=True
    ):
        images[index].append(ImageSpan(start=start, end=end, digest=digest.tobytes().hex()))

    def support(i: int) -> SamplingSupport | None:
        if support_bounds is None:
            return None
        offsets = support_bounds[trained_bounds[i] : trained_bounds[i + 1] + 1]
        return SamplingSupport(offsets=offsets - offsets[0], token_ids=arrays["support_ids"][offsets[0] : offsets[-1]])

    return [
        TrainingRow(
            **{name: arrays[name][start:end] for name in ROW_ARRAYS},
            rollout_id=int(arrays["row_rollout"][i]),
            group_id=int(arrays["row_group"][i]),
            support=support(i),
            routes=None if routes is None else routes[route_bounds[i] : route_bounds[i + 1]],
            images=tuple(images[i]),
        )
        for i, (start, end) in enumerate(pairwise(bounds))
    ]
