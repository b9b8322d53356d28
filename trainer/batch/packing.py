"""Several training rows as one flat sequence, with what is trained and what predicts it.

This is the one place where targets are shifted against inputs: the hidden state at position p - 1 predicts the token
at position p. `PackedBatch.target_index_T` holds the p - 1, every other `_T` tensor belongs to the token at p.

Rows are told apart by their lengths (`cu_seqlens`), never by comparing ids with a padding token, which may equal a
token that was sampled. There is no padding. Where rows share what they begin with (trainer/batch/prefixes.py), a pack
holds it once, and of each row the stretch behind it.

Shape legend: _L tokens of the pack, _R rows of the pack, _T trained tokens of the pack, _S rollouts of the step,
_N trained tokens of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from rollout.errors import EvidenceError
from rollout.records import TrainingRow
from trainer.batch.prefixes import Prefix, shared, whole

DUMMY_LENGTH = 2
"""Tokens of a dummy pack: the shortest row in which a token attends to another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayout:
    """Where the trained tokens of each row lie among all trained tokens of one optimizer step.

    It depends on the rows and their order alone, not on ranks or packs, so that a per-token tensor of the step
    (advantages, weights, old logprobs) can be computed on any rank and looked up by `PackedBatch.token_index_T`.
    """

    token_start: np.ndarray
    """(rows + 1,) int64: row i holds the trained tokens `[token_start[i], token_start[i + 1])` of the step."""
    rollout_index: np.ndarray
    """(rows,) int64: index into `rollout_ids` of the rollout that the row belongs to."""
    rollout_ids: tuple[int, ...]
    """`rollout_id` of every rollout of the step; their order is the order of `_S` tensors."""

    @classmethod
    def of(cls, rows: Sequence[TrainingRow], rollout_ids: Sequence[int] | None = None) -> StepLayout:
        """Lay out the rows of a whole step.

        Args:
            rows: all rows of the step, in the order that every rank agrees on.
            rollout_ids: all rollouts of the step, also those without rows; by default in order of their first row.

        Raises:
            EvidenceError: a row belongs to a rollout that is not among `rollout_ids`.
        """
        ids = tuple(dict.fromkeys(row.rollout_id for row in rows) if rollout_ids is None else rollout_ids)
        index_of = {rollout_id: index for index, rollout_id in enumerate(ids)}
        unknown = sorted({row.rollout_id for row in rows} - index_of.keys())
        if unknown:
            raise EvidenceError(
                f"rows of rollouts {unknown[:5]} that are not among the {len(ids)} rollouts of the step"
            )
        return cls(
            token_start=np.concatenate([[0], np.cumsum([row.num_trained for row in rows], dtype=np.int64)]),
            rollout_index=np.array([index_of[row.rollout_id] for row in rows], dtype=np.int64),
            rollout_ids=ids,
        )

    @property
    def num_tokens(self) -> int:
        """N: trained tokens of the step."""
        return int(self.token_start[-1])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBatch:
    """Rows as one sequence. All tensors are on one device; index tensors are int64."""

    ids: torch.Tensor
    """(L,) token ids."""
    position_ids: torch.Tensor
    """(L,) position of each token within its own row."""
    cu_seqlens: torch.Tensor
    """(R + 1,) int32: row r is `[cu_seqlens[r], cu_seqlens[r + 1])`; of a row that shares, its stretch."""
    row_lengths: tuple[int, ...]
    """R lengths, for code that must not wait for the device to learn them."""
    prefixes: tuple[Prefix, ...] | None = None
    """What each stretch continues; None: nothing is shared, and every stretch is a whole row."""
    target_index_T: torch.Tensor
    """(T,) position in the pack whose hidden state predicts the trained token."""
    target_ids_T: torch.Tensor
    """(T,) the trained tokens."""
    sampling_logprobs_T: torch.Tensor
    """(T,) float32: log-probability that the engine sampled the token with."""
    versions_T: torch.Tensor
    """(T,) weight version that sampled the token, -1 if unknown."""
    turns_T: torch.Tensor
    """(T,) index of the engine call that sampled the token."""
    rollout_T: torch.Tensor
    """(T,) rollout of the token: index into `_S` tensors of the step."""
    token_index_T: torch.Tensor
    """(T,) the token's place among the trained tokens of the step: index into `_N` tensors."""
    support_offsets: torch.Tensor | None = None
    """(T + 1,): token t was drawn from `support_ids[support_offsets[t]:support_offsets[t + 1]]`. None: from all."""
    support_ids: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def num_rows(self) -> int:
        return len(self.row_lengths)

    @property
    def num_targets(self) -> int:
        return len(self.target_ids_T)

    def to(self, device: torch.device | str) -> PackedBatch:
        tensors = {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), torch.Tensor)}
        return replace(self, **{name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()})


def collate(
    rows: Sequence[TrainingRow] | Mapping[int, TrainingRow],
    indices: Sequence[int],
    layout: StepLayout | None = None,
    *,
    share_prefixes: bool = False,
    device: torch.device | str = "cpu",
) -> PackedBatch:
    """Make one pack of `rows[i] for i in indices`, with their trained tokens in that order.

    Args:
        rows: by their index in the step. A rank that holds only its own rows passes a mapping, and the layout.
        indices: the rows of this pack; none gives a dummy pack (`dummy`).
        layout: of the whole step; by default that of `rows`.
        share_prefixes: hold what rows begin with once, for attention that knows of it (`packed_rows`).
        device: where the tensors go.

    Raises:
        EvidenceError: only some rows of the pack carry a sampling support, or a support does not fit its row.
    """
    if not indices:
        return dummy(device=device)
    if layout is None:
        assert not isinstance(rows, Mapping), "part of the rows does not tell where they lie in the step: pass a layout"
        layout = StepLayout.of(rows)
    chosen = [rows[i] for i in indices]
    stretches = (shared if share_prefixes else whole)([row.ids for row in chosen])
    targets = [np.flatnonzero(row.loss_mask) for row in chosen]
    counts = [len(target) for target in targets]

    def trained(name: str) -> np.ndarray:
        return np.concatenate([getattr(row, name)[target] for row, target in zip(chosen, targets, strict=True)])

    support = _support(chosen, counts)
    batch = PackedBatch(
        ids=_int64(stretches.ids),
        position_ids=_int64(stretches.position_ids),
        cu_seqlens=torch.from_numpy(np.cumsum([0, *stretches.lengths]).astype(np.int32)),
        row_lengths=stretches.lengths,
        prefixes=stretches.prefixes if any(stretches.prefixes) else None,
        # The shift: a trained token at position p of its row is predicted by the hidden state at p - 1.
        target_index_T=_int64(
            np.concatenate([place[target - 1] for place, target in zip(stretches.places, targets, strict=True)])
        ),
        target_ids_T=_int64(trained("ids")),
        sampling_logprobs_T=torch.from_numpy(trained("sampling_logprobs").astype(np.float32)),
        versions_T=_int64(trained("versions")),
        turns_T=_int64(trained("turns")),
        rollout_T=_int64(np.repeat(layout.rollout_index[list(indices)], counts)),
        token_index_T=_int64(
            np.concatenate([layout.token_start[i] + np.arange(n) for i, n in zip(indices, counts, strict=True)])
        ),
        support_offsets=None if support is None else _int64(support[0]),
        support_ids=None if support is None else _int64(support[1]),
    )
    return batch.to(device)


def dummy(*, device: torch.device | str = "cpu") -> PackedBatch:
    """One short row in which nothing is trained.

    A rank with fewer microbatches than the others runs it forward and backward, because ZeRO-3 gathers parameters
    collectively: every rank must make the same passes. It adds exact zeros to the gradient.
    """
    empty = torch.zeros(0, dtype=torch.int64)
    batch = PackedBatch(
        ids=torch.zeros(DUMMY_LENGTH, dtype=torch.int64),
        position_ids=torch.arange(DUMMY_LENGTH),
        cu_seqlens=torch.tensor([0, DUMMY_LENGTH], dtype=torch.int32),
        row_lengths=(DUMMY_LENGTH,),
        target_index_T=empty,
        target_ids_T=empty,
        sampling_logprobs_T=torch.zeros(0),
        versions_T=empty,
        turns_T=empty,
        rollout_T=empty,
        token_index_T=empty,
    )
    return batch.to(device)


def pack(row_lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Put rows into as few packs of at most `token_budget` tokens as first-fit decreasing finds.

    First-fit decreasing needs at most 11/9 of the optimal number of packs, plus one (Dósa 2007). Deterministic. A
    row longer than the budget gets a pack of its own (`num_oversized` counts them).

    Returns:
        Row indices of each pack; together they are every row exactly once.
    """
    if token_budget < 1:
        raise ValueError(f"token_budget must be at least 1, found {token_budget}")
    order = sorted(range(len(row_lengths)), key=lambda i: (-row_lengths[i], i))
    packs: list[list[int]] = []
    room: list[int] = []
    for i in order:
        length = row_lengths[i]
        slot = next((p for p, free in enumerate(room) if free >= length), None)
        if slot is None:
            packs.append([i])
            room.append(token_budget - length)
        else:
            packs[slot].append(i)
            room[slot] -= length
    return packs


def num_oversized(row_lengths: Sequence[int], token_budget: int) -> int:
    """Rows that exceed the token budget on their own; each runs alone and may need more memory than planned."""
    return sum(length > token_budget for length in row_lengths)


def _support(chosen: Sequence[TrainingRow], counts: Sequence[int]) -> tuple[np.ndarray, np.ndarray] | None:
    """CSR over the trained tokens of all chosen rows, or None if no row was sampled with truncation."""
    relevant = [(row, count) for row, count in zip(chosen, counts, strict=True) if count]
    supports = [row.support for row, _ in relevant if row.support is not None]
    if not supports:
        return None
    if len(supports) != len(relevant):
        raise EvidenceError(
            f"{len(supports)} of {len(relevant)} rows of a pack carry the sampling support; expected all or none"
        )
    for (row, count), support in zip(relevant, supports, strict=True):
        if len(support.offsets) != count + 1:
            raise EvidenceError(
                f"row of rollout {row.rollout_id}: sampling support for {len(support.offsets) - 1} tokens, "
                f"{count} are trained"
            )
    sizes = np.concatenate([np.diff(support.offsets) for support in supports])
    offsets = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    return offsets, np.concatenate([support.token_ids for support in supports])


def _int64(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int64))
