"""Packs: several training rows as one flat sequence without padding.

This is the one place where targets are shifted against inputs: the hidden state at position p - 1 predicts the token
at position p. `PackedBatch.target_index_T` holds the p - 1, every other `_T` tensor belongs to the token at p.

Row boundaries come from lengths (`cu_seqlens`), never from a padding token, which may equal a sampled token. If rows
share a prefix (trainer/batch/prefixes.py), a pack holds it once, and the stretch of each row after it.

Shape legend: _L tokens of the pack, _R rows of the pack, _T trained tokens of the pack, _S rollouts of the step,
_N trained tokens of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from lockstep.rollout.errors import EvidenceError
from lockstep.rollout.records import TrainingRow
from lockstep.trainer.batch.prefixes import Prefix, Stretches, shared, token_keys, whole

if TYPE_CHECKING:
    from lockstep.trainer.batch.packed_images import ImageSource, PackedImages

NO_ROUTE = -1
"""Expert of a token without a route."""
DUMMY_LENGTH = 2
"""Shortest row in which a token attends to another one."""


def whole_row(ids: Sequence[int]) -> TrainingRow:
    """Return a row in which every token but the first counts as sampled, to score a plain sequence.

    ids: `PromptIds` with images count without the tokens of images.
    """
    length, images = len(ids), getattr(ids, "images", ())
    loss_mask = np.arange(length) > 0
    for image in images:
        loss_mask[image.start : image.end] = False
    return TrainingRow(
        ids=np.asarray(ids, dtype=np.int64),
        loss_mask=loss_mask,
        images=images,
        sampling_logprobs=np.zeros(length, dtype=np.float32),
        versions=np.full(length, -1, dtype=np.int32),
        turns=np.zeros(length, dtype=np.int32),
    )


DUMMY = replace(whole_row([0] * DUMMY_LENGTH), loss_mask=np.zeros(DUMMY_LENGTH, dtype=bool))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayout:
    """Places of each row's trained tokens among all trained tokens of a step.

    They depend only on the rows and their order, not on ranks or packs. So a per-token tensor of the step (advantages,
    weights, old logprobs) can be computed on any rank and looked up by `PackedBatch.token_index_T`.
    """

    token_start: np.ndarray
    """(rows + 1,) int64: row i holds the trained tokens `[token_start[i], token_start[i + 1])` of the step."""
    rollout_index: np.ndarray
    """(rows,) int64 rollout of each row: index into `_S` tensors."""

    @classmethod
    def of(cls, rows: Sequence[TrainingRow], rollout_ids: Sequence[int] | None = None) -> StepLayout:
        """Lay out all rows of a step, in the order on which all ranks agree.

        rollout_ids: ids of all rollouts, in the order of `_S` tensors, including those without rows; by default in the
        order of their first row. Raises `EvidenceError` if a row has another rollout.
        """
        ids = dict.fromkeys(row.rollout_id for row in rows) if rollout_ids is None else rollout_ids
        index_of = {rollout_id: index for index, rollout_id in enumerate(ids)}
        unknown = sorted({row.rollout_id for row in rows} - index_of.keys())
        if unknown:
            raise EvidenceError(
                f"rows of rollouts {unknown[:5]} that are not among the {len(ids)} rollouts of the step"
            )
        return cls(
            token_start=np.concatenate([[0], np.cumsum([row.num_trained for row in rows], dtype=np.int64)]),
            rollout_index=np.array([index_of[row.rollout_id] for row in rows], dtype=np.int64),
        )

    @property
    def num_tokens(self) -> int:
        """N."""
        return int(self.token_start[-1])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBatch:
    """Rows as one sequence. All tensors but `token_index_T` are on one device; index tensors are int64."""

    ids: torch.Tensor
    """(L,) token ids."""
    position_ids: torch.Tensor
    """(L,) position of each token within its own row."""
    cu_seqlens: torch.Tensor
    """(R + 1,) int32: row r, or its stretch after a shared prefix, is `[cu_seqlens[r], cu_seqlens[r + 1])`."""
    row_lengths: tuple[int, ...]
    """The same as R lengths on the host, for code that must not wait for the device."""
    prefixes: tuple[Prefix, ...] | None = None
    """Prefix that each stretch continues; None if every stretch is a whole row."""
    target_index_T: torch.Tensor
    """(T,) position in the pack whose hidden state predicts the trained token."""
    target_ids_T: torch.Tensor
    """(T,) the trained tokens."""
    sampling_logprobs_T: torch.Tensor
    """(T,) float32 logprobs of the engine."""
    rollout_T: torch.Tensor
    """(T,) rollout of each token: index into `_S` tensors."""
    token_index_T: torch.Tensor
    """(T,) place of each token among the trained tokens of the step: index into `_N` tensors; always on the host, as
    those are."""
    support_offsets: torch.Tensor | None = None
    """(T + 1,): token t was drawn from `support_ids[support_offsets[t]:support_offsets[t + 1]]`; None: from the whole
    vocabulary."""
    support_ids: torch.Tensor | None = None
    routes: torch.Tensor | None = None
    """(L, layers, k) int16 experts of each token, `NO_ROUTE` if unknown; None: the model chooses for all tokens."""
    images: PackedImages | None = None
    """None: the rows have no images."""

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def num_rows(self) -> int:
        return len(self.row_lengths)

    def to(self, device: torch.device | str) -> PackedBatch:
        names = (field.name for field in fields(self) if field.name != "token_index_T")
        tensors = {name: value for name in names if isinstance(value := getattr(self, name), torch.Tensor)}
        return replace(
            self,
            **{name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()},
            images=None if self.images is None else self.images.to(device),
        )


def collate(
    rows: Sequence[TrainingRow],
    indices: Sequence[int],
    layout: StepLayout | None = None,
    *,
    share_prefixes: bool = False,
    with_routes: bool = True,
    images: ImageSource | None = None,
    device: torch.device | str = "cpu",
) -> PackedBatch:
    """Pack `rows[i] for i in indices`, with their trained tokens in that order.

    Args:
        rows: all rows of the step.
        indices: rows of this pack. None of them gives a dummy pack, one short row in which nothing is trained: a rank
            with fewer microbatches than the others runs it forward and backward, because ZeRO-3 gathers parameters
            collectively and every rank must make the same passes. It adds exact zeros to the gradient.
        layout: of the whole step; by default that of `rows`.
        share_prefixes: hold common prefixes once, for attention that supports it (`packed_rows`).
        with_routes: False leaves the routes of the rows out, for a model that routes by itself.
        images: of the rows; None for a model that sees none.
        device: device of the tensors.

    Raises:
        EvidenceError: only some rows of the pack carry a sampling support, or a support does not fit its row. Or an
            image is missing, does not fit its row, or has trained tokens.
    """
    if not indices:
        rows, indices, layout = [DUMMY], [0], None
    layout = layout or StepLayout.of(rows)
    pack_rows = [rows[i] for i in indices]
    stretches = _stretches(pack_rows, share_prefixes=share_prefixes, with_routes=with_routes)
    targets = [np.flatnonzero(row.loss_mask) for row in pack_rows]
    counts = [len(target) for target in targets]

    def trained(name: str) -> np.ndarray:
        return np.concatenate([getattr(row, name)[target] for row, target in zip(pack_rows, targets, strict=True)])

    support = _support(pack_rows, counts)
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
        rollout_T=_int64(np.repeat(layout.rollout_index[list(indices)], counts)),
        token_index_T=_int64(
            np.concatenate([layout.token_start[i] + np.arange(n) for i, n in zip(indices, counts, strict=True)])
        ),
        support_offsets=None if support is None else _int64(support[0]),
        support_ids=None if support is None else _int64(support[1]),
        routes=_routes(pack_rows, stretches) if with_routes else None,
        images=_images(pack_rows, stretches, images),
    )
    return batch.to(device)


def _images(rows: Sequence[TrainingRow], stretches: Stretches, source: ImageSource | None) -> PackedImages | None:
    if not any(row.images for row in rows):
        return None
    from lockstep.trainer.batch.packed_images import packed_images  # packs of text do not load it

    return packed_images(rows, stretches.places, num_tokens=len(stretches.ids), source=source)


def row_places(
    rows: Sequence[TrainingRow], indices: Sequence[int], *, share_prefixes: bool, with_routes: bool
) -> Sequence[np.ndarray]:
    """Return the positions of each row's tokens in the pack that `collate` makes of the same arguments."""
    return _stretches([rows[i] for i in indices], share_prefixes=share_prefixes, with_routes=with_routes).places


def _stretches(rows: Sequence[TrainingRow], *, share_prefixes: bool, with_routes: bool) -> Stretches:
    ids = [row.ids for row in rows]
    if not share_prefixes:
        return whole(ids)
    return shared(ids, [token_keys(row, with_routes=with_routes) for row in rows])


def pack(row_lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Return the row indices of packs of at most `token_budget` tokens, by first-fit decreasing. Deterministic.

    It needs at most 11/9 of the optimal number of packs, plus one (Dósa 2007). A row longer than the budget gets a pack
    of its own.
    """
    if token_budget < 1:
        raise ValueError(f"token_budget must be at least 1, found {token_budget}")
    packs: list[list[int]] = []
    size = 1 << (len(row_lengths) - 1).bit_length() if row_lengths else 1
    most_room = [token_budget] * (2 * size)  # a binary tree: pack p is the leaf size + p, empty ones included
    for i, length in sorted(enumerate(row_lengths), key=lambda row: (-row[1], row[0])):
        node = 1 if length <= token_budget else size + len(packs)
        while node < size:
            node = 2 * node + (most_room[2 * node] < length)
        if node - size == len(packs):
            packs.append([])
        packs[node - size].append(i)
        most_room[node] -= length
        while node > 1:
            node //= 2
            most_room[node] = max(most_room[2 * node], most_room[2 * node + 1])
    return packs


def _support(chosen: Sequence[TrainingRow], counts: Sequence[int]) -> tuple[np.ndarray, np.ndarray] | None:
    """Return offsets and ids over the trained tokens of all rows, or None if no row was sampled with truncation."""
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


def _routes(chosen: Sequence[TrainingRow], stretches: Stretches) -> torch.Tensor | None:
    """Return the (L, layers, k) int16 experts of the tokens of a pack, or None if no row has any."""
    routes = [row.routes for row in chosen if row.routes is not None]
    if not routes:
        return None
    experts = np.full((len(stretches.ids), *routes[0].shape[1:]), NO_ROUTE, dtype=np.int16)
    for row, place in zip(chosen, stretches.places, strict=True):
        if row.routes is not None:
            experts[place[: len(row.routes)]] = row.routes
    return torch.from_numpy(experts)


def _int64(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int64))
