"""All rollouts of one step, the same on every rank.

Ranks that have an engine make rollouts; all ranks get all rows. Rows are small (about 20 bytes a token), and in
exchange everything that is counted or normalised over the step (denominators, advantages, correction weights and
their metrics) is computed by the same code on the same numbers everywhere. No partition of the work can change it.

Shape legend: _S delivered rollouts of the step, _K their turns, _N trained tokens of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import safetensors.numpy
import torch

from rewards.shaping import turn_rewards
from rollout.episode.rows import rows_from_calls
from rollout.errors import EvidenceError
from rollout.records import Rollout, SamplingSupport, TrainingRow
from trainer.batch.packing import StepLayout

ROW_ARRAYS = {
    "ids": np.int64,
    "loss_mask": np.bool_,
    "sampling_logprobs": np.float32,
    "versions": np.int32,
    "turns": np.int32,
}
ROLLOUT_ARRAYS = ("rollout_ids", "group_S", "rewards_S", "is_kept_S", "greedy_rewards_S", "num_turns_S")
BATCH_ARRAYS = (*ROLLOUT_ARRAYS, "turn_rewards_K")


@dataclass(frozen=True, kw_only=True, eq=False)
class StepBatch:
    """Rows and rollouts of one step. Failed rollouts are not in it: they are counted elsewhere and never trained."""

    rows: tuple[TrainingRow, ...]
    rollout_ids: np.ndarray  # (S,) int64, ascending
    group_S: np.ndarray  # (S,) int64
    rewards_S: np.ndarray  # (S,) float64
    is_kept_S: np.ndarray  # (S,) bool: False: masked, for instance because it was truncated
    greedy_rewards_S: np.ndarray  # (S,) float64: of the greedy answer to the same prompt; NaN: none was sampled
    num_turns_S: np.ndarray  # (S,) int64: engine calls, also those without trained tokens
    turn_rewards_K: (
        np.ndarray
    )  # (K,) float64: of the turns of all rollouts in order; those of a rollout add up to its reward

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
        """(K,) int64 rollout of each turn."""
        return torch.from_numpy(np.repeat(np.arange(self.num_rollouts), self.num_turns_S))

    @cached_property
    def turn_index_K(self) -> torch.Tensor:
        """(K,) int64 which turn of its rollout it is."""
        return torch.from_numpy(np.concatenate([np.zeros(0, int), *map(np.arange, self.num_turns_S)]))

    def _trained(self, name: str) -> torch.Tensor:
        parts = [getattr(row, name)[row.loss_mask] for row in self.rows]
        return torch.from_numpy(np.concatenate(parts)) if parts else torch.zeros(0)


def encode(
    rollouts: Sequence[Rollout],
    *,
    mask_truncated: bool,
    greedy_rewards: Mapping[int, float] | None = None,
    with_turn_rewards: bool = False,
) -> bytes:
    """The trainable rollouts of one rank as bytes: arrays only, nothing that runs when it is read (safetensors).

    greedy_rewards: by group id. with_turn_rewards: else the last turn gets the whole reward.
    Raises `EvidenceError` if only some rows carry the support they were sampled from: the ratios of the others would be
    over another one.
    """
    greedy = greedy_rewards or {}
    delivered = [rollout for rollout in rollouts if rollout.is_trainable]
    rows = [
        row
        for rollout in delivered
        for row in rows_from_calls(rollout.calls, rollout_id=rollout.rollout_id, group_id=rollout.group_id)
    ]
    arrays = _row_arrays(rows)
    arrays |= {
        "rollout_ids": np.array([rollout.rollout_id for rollout in delivered], dtype=np.int64),
        "group_S": np.array([rollout.group_id for rollout in delivered], dtype=np.int64),
        "rewards_S": np.array([rollout.reward for rollout in delivered], dtype=np.float64),
        "is_kept_S": np.array([not (mask_truncated and rollout.is_cut_off) for rollout in delivered], dtype=np.bool_),
        "greedy_rewards_S": np.array([greedy.get(rollout.group_id, np.nan) for rollout in delivered], dtype=np.float64),
    }
    by_turn = [turn_rewards(rollout, reported=with_turn_rewards) for rollout in delivered]
    arrays |= {
        "num_turns_S": np.array([len(rewards) for rewards in by_turn], dtype=np.int64),
        "turn_rewards_K": np.concatenate([np.zeros(0), *by_turn]),
    }
    return safetensors.numpy.save(arrays)


def encode_batch(batch: StepBatch) -> bytes:
    """A merged batch as bytes that `decode` makes it from again."""
    return safetensors.numpy.save(_row_arrays(batch.rows) | {name: getattr(batch, name) for name in BATCH_ARRAYS})


def _row_arrays(rows: Sequence[TrainingRow]) -> dict[str, np.ndarray]:
    arrays = {
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
        if len(supports) != len(rows):
            raise EvidenceError(f"{len(supports)} of {len(rows)} rows carry the sampling support; expected all or none")
        arrays["support_sizes"] = np.concatenate([np.diff(support.offsets) for support in supports])
        arrays["support_ids"] = np.concatenate([support.token_ids for support in supports])
    return arrays


def decode(payloads: Sequence[bytes]) -> StepBatch:
    """Merge what every rank encoded, in the order of rollout ids."""
    rows: list[TrainingRow] = []
    tables: list[dict[str, np.ndarray]] = []
    for payload in payloads:
        arrays = safetensors.numpy.load(payload)
        tables.append(arrays)
        rows += _rows(arrays)
    merged = {name: np.concatenate([t[name] for t in tables]) for name in ROLLOUT_ARRAYS}
    order = np.argsort(merged["rollout_ids"], kind="stable")
    turns = np.split(np.concatenate([t["turn_rewards_K"] for t in tables]), np.cumsum(merged["num_turns_S"])[:-1])
    rows.sort(key=lambda row: row.rollout_id)  # stable: rows of a rollout stay in the order of its branches
    return StepBatch(
        rows=tuple(rows),
        turn_rewards_K=np.concatenate([np.zeros(0), *(turns[i] for i in order)]),
        **{name: array[order] for name, array in merged.items()},
    )


def _rows(arrays: dict[str, np.ndarray]) -> list[TrainingRow]:
    bounds = np.concatenate([[0], np.cumsum(arrays["row_lengths"])])
    trained = np.concatenate([[0], np.cumsum(arrays["loss_mask"])])[bounds]
    with_support = "support_sizes" in arrays
    support_bounds = np.concatenate([[0], np.cumsum(arrays["support_sizes"])]) if with_support else None
    rows = []
    for i, (start, end) in enumerate(pairwise(bounds)):
        support = None
        if support_bounds is not None:
            offsets = support_bounds[trained[i] : trained[i + 1] + 1]
            support = SamplingSupport(
                offsets=offsets - offsets[0], token_ids=arrays["support_ids"][offsets[0] : offsets[-1]]
            )
        rows.append(
            TrainingRow(
                **{name: arrays[name][start:end] for name in ROW_ARRAYS},
                rollout_id=int(arrays["row_rollout"][i]),
                group_id=int(arrays["row_group"][i]),
                support=support,
            )
        )
    return rows
