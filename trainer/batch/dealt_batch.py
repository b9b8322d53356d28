"""A step on several ranks: numbers about all rows on every rank, and a row only where it is computed.

    rank 0   rows ─► lengths, counts, rewards, logprobs of the engine ─► every rank     `dealt`
                └─► plan ─► ids, masks and more of its packs' rows ─► each rank         `DealtBatch.share`

Rank 0 plans. When a rank first computes a row, rank 0 sends it the parts that the numbers lack. So a row travels once,
or more often if several passes assign it to different ranks. All ranks have the same numbers, and compute what is
counted or normalized over the step from them: no partition of the work can change it.

Shape legend: _R rows of the step, _N trained tokens of the step.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import safetensors.numpy
import torch

from lockstep.rollout.episode.prepared_calls import OF_TRAINED, checksum
from lockstep.rollout.errors import EvidenceError
from lockstep.rollout.records import TrainingRow
from lockstep.trainer.batch.assignment import Plan, RankShare
from lockstep.trainer.batch.batch_bytes import rollout_arrays, rollout_values, row_arrays, rows_of, to_bytes
from lockstep.trainer.batch.packing import StepLayout
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.batch.teacher_scores import TeacherScores
from lockstep.trainer.distributed.distributed import Distributed


def dealt(batch: StepBatch, distributed: Distributed) -> StepBatch:
    """Return rank 0's batch on every rank, where ranks other than 0 have no row yet; a collective."""
    if distributed.world_size == 1:
        return batch
    payload = to_bytes(_numbers(batch) | rollout_arrays(batch)) if distributed.is_main else b""
    arrays = safetensors.numpy.load(distributed.broadcast_bytes(payload))
    return DealtBatch(
        rows=batch.rows if distributed.is_main else RowsOfRank(len(arrays["row_lengths"])),
        numbers=_NumbersOfRows.of(arrays),
        holdings=tuple(set() for _ in range(distributed.world_size)),
        teacher=batch.teacher if distributed.is_main else TeacherOfRank.of(arrays),
        **rollout_values(arrays),
    )


class RowsOfRank(Sequence[TrainingRow]):
    """All rows of a step by index, of which this rank has some."""

    def __init__(self, total: int, rows: Mapping[int, TrainingRow] | None = None) -> None:
        self._total = total
        self.here = dict(rows or {})

    def __len__(self) -> int:
        return self._total

    def __getitem__(self, index: Any) -> Any:
        """Return a row. Raises `EvidenceError` for one that is on other ranks."""
        if not 0 <= index < self._total:
            raise IndexError(f"row {index} of {self._total}")
        if index not in self.here:
            raise EvidenceError(
                f"row {index} of the step is not on this rank, which has {len(self.here)} of {self._total}: a rank has "
                "the rows that it computes, and rank 0 has all"
            )
        return self.here[index]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TeacherOfRank(TeacherScores):
    """A teacher's scores on another rank than 0, with the most probable tokens of those rows that the rank has."""

    mass: np.ndarray
    """(N,) float64."""
    is_here: np.ndarray
    """(N,) bool: False where `top_ids` and `top_logp` are not the teacher's, but 0."""

    def __post_init__(self) -> None:
        """Check nothing: rank 0 has checked the scores."""

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> TeacherOfRank | None:
        """Return the scores that `_numbers` names, among other arrays, before any row has come; None if it has none."""
        if "logp_of_teacher" not in arrays:
            return None
        shape = len(logp := arrays["logp_of_teacher"]), int(arrays["top_k_of_teacher"][0])
        return cls(
            logp=logp,
            top_ids=np.zeros(shape, np.int32),  # takes memory only where it is written
            top_logp=np.zeros(shape, np.float32),
            version=arrays["version_of_teacher"],
            mass=arrays.get("mass_of_teacher", np.zeros(len(logp))),
            is_here=np.zeros(len(logp), np.bool_),
        )

    def top_at(self, index_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_here[index_T.numpy()].all():
            raise EvidenceError("the teacher's most probable tokens of these rows are on other ranks")
        return super(TeacherOfRank, self).top_at(index_T)

    @property
    def top_mass_N(self) -> torch.Tensor:
        return torch.from_numpy(self.mass)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _NumbersOfRows:
    """Numbers of all rows."""

    layout: StepLayout
    lengths: np.ndarray
    """(R,) int64 tokens."""
    of_tokens: Mapping[str, np.ndarray]
    """(N,) values of trained tokens by the name of their array in `TrainingRow`."""

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> _NumbersOfRows:
        """Invert `_numbers`, among other arrays."""
        start = np.concatenate([[0], np.cumsum(arrays["row_tokens"], dtype=np.int64)])
        runs = {name: np.repeat(arrays[f"{name}_of_runs"], arrays[f"{name}_runs"]) for name in IN_RUNS}
        return cls(
            layout=StepLayout(token_start=start, rollout_index=arrays["row_index"]),
            lengths=arrays["row_lengths"],
            of_tokens={"sampling_logprobs": arrays["sampling_logprobs"], **runs},
        )


ELSEWHERE = dict(zip(OF_TRAINED, (0.0, -1, -1), strict=True))
"""Values of these arrays at tokens that are not trained."""
OF_TEACHER = ("top_ids", "top_logp")
"""Scores of a teacher that travel with the rows."""
IN_RUNS = ("versions", "turns")
"""Those that are equal over long runs, and travel as runs."""


def _numbers(batch: StepBatch) -> dict[str, np.ndarray]:
    arrays = {
        "row_lengths": batch.row_lengths,
        "row_tokens": np.diff(batch.layout.token_start),
        "row_index": batch.layout.rollout_index,
        "sampling_logprobs": batch.sampling_logprobs_N.numpy(),
    }
    for name, values_N in (("versions", batch.versions_N), ("turns", batch.turns_N)):
        values = values_N.numpy().astype(np.int32)
        starts = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))[: len(values)]
        arrays |= {f"{name}_of_runs": values[starts], f"{name}_runs": np.diff([*starts, len(values)])}
    if (teacher := batch.teacher) is not None:
        top_k = teacher.top_ids.shape[1]
        arrays |= {"logp_of_teacher": teacher.logp, "version_of_teacher": teacher.version}
        arrays |= {"top_k_of_teacher": np.array([top_k])}
        arrays |= {"mass_of_teacher": teacher.top_mass_N.numpy()} if top_k else {}
    return arrays


def _checksum(row: TrainingRow) -> int:
    """Return a checksum of what is trained of a row, with its support and experts."""
    result = checksum(row)
    arrays = [] if row.support is None else [row.support.offsets, row.support.token_ids]
    for array in [*arrays, *([] if row.routes is None else [row.routes])]:
        result = zlib.crc32(np.ascontiguousarray(array).data, result)
    return result


def _scatter(payload: Callable[[int], bytes], distributed: Distributed) -> bytes:
    """Return on each rank what rank 0's `payload(rank)` returns for it, and no bytes on rank 0 itself.

    Rank 0 makes one payload at a time, and drops it when it is sent. If it fails to make one, it raises the error, and
    the ranks that wait get no bytes.
    """
    size = torch.zeros(1, dtype=torch.int64)
    if distributed.is_main:
        ranks = iter(range(1, distributed.world_size))
        for rank in ranks:
            try:
                content = torch.frombuffer(bytearray(payload(rank)), dtype=torch.uint8)
            except BaseException:
                for waiting in (rank, *ranks):
                    distributed.send(size.zero_(), waiting)
                raise
            distributed.send(size.fill_(len(content)), rank)
            distributed.send(content, rank)
        return b""
    distributed.receive(size, 0)()
    if not size:
        return b""
    content = torch.zeros(int(size), dtype=torch.uint8)
    distributed.receive(content, 0)()
    return content.numpy().tobytes()


def _collect(payload: bytes, distributed: Distributed) -> list[bytes]:
    """Return the payloads of ranks 1 and up on rank 0, in their order; nothing elsewhere."""
    sizes = distributed.gather(torch.tensor([len(payload)])).tolist()
    if not distributed.is_main:
        distributed.send(torch.frombuffer(bytearray(payload), dtype=torch.uint8), 0)
        return []
    contents = [torch.zeros(size, dtype=torch.uint8) for size in sizes[1:]]
    waits = [distributed.receive(content, rank) for rank, content in enumerate(contents, 1)]
    for wait in waits:
        wait()
    return [content.numpy().tobytes() for content in contents]


@dataclass(frozen=True, kw_only=True, eq=False)
class DealtBatch(StepBatch):
    """A step whose rows are dealt to the ranks that compute them. Rank 0 has all of them."""

    numbers: _NumbersOfRows
    holdings: tuple[set[int], ...]
    """Rows that each rank has from rank 0, which keeps the list."""

    @cached_property
    def layout(self) -> StepLayout:
        return self.numbers.layout

    @cached_property
    def row_lengths(self) -> np.ndarray:
        return self.numbers.lengths

    def share(self, make: Callable[[], Plan], distributed: Distributed) -> RankShare:
        plan = distributed.together(lambda: make() if distributed.is_main else None)

        def message(rank: int) -> bytes:
            assert plan is not None
            return self._deal(plan.share(rank), self.holdings[rank])

        def exchange() -> RankShare:
            payload = _scatter(message, distributed)
            return self._receive(payload) if plan is None else plan.share(0)

        return distributed.together(exchange)

    def with_routes(self, routes: Mapping[int, np.ndarray], distributed: Distributed) -> StepBatch:
        own = sorted(routes)
        message = {"indices": np.array(own), "routes": np.concatenate([routes[row] for row in own])} if own else {}
        payloads = _collect(b"" if distributed.is_main else to_bytes(message), distributed)
        if not distributed.is_main:
            rows = {row: replace(self.rows[row], routes=routes[row]) for row in own}
            return replace(self, rows=RowsOfRank(len(self.rows), rows))
        of_rows, holdings = dict(routes), [set[int]()]
        for arrays in map(safetensors.numpy.load, payloads):
            indices = arrays["indices"] if arrays else np.zeros(0, int)
            parts = np.split(arrays["routes"], np.cumsum(self.row_lengths[indices])[:-1]) if arrays else []
            of_rows |= dict(zip(indices.tolist(), parts, strict=True))
            holdings.append(set(indices.tolist()))
        rows = tuple(replace(row, routes=of_rows[index]) for index, row in enumerate(self.rows))
        return replace(self, rows=rows, holdings=tuple(holdings))

    def _tokens(self, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the indices of the trained tokens of rows, among those of the step."""
        start = self.layout.token_start
        return np.concatenate([np.zeros(0, int), *(np.arange(start[row], start[row + 1]) for row in rows)])

    def _trained(self, name: str) -> torch.Tensor:
        return torch.from_numpy(self.numbers.of_tokens[name])

    def _deal(self, share: RankShare, held: set[int]) -> bytes:
        """Return the share of another rank, with the rows that it lacks; from here on it has them."""
        missing = sorted({row for pack in share.packs for row in pack} - held)
        held.update(missing)
        tokens = self._tokens(missing)
        scores = {name: getattr(self.teacher, name)[tokens] for name in OF_TEACHER} if self.teacher else {}
        arrays = row_arrays([self.rows[row] for row in missing], names=("ids", "loss_mask")) | scores
        arrays |= {
            "indices": np.array(missing, dtype=np.int64),
            "checksums": np.array([_checksum(self.rows[row]) for row in missing], dtype=np.int64),
            "pack_rows": np.array([row for pack in share.packs for row in pack], dtype=np.int64),
            "pack_sizes": np.array(list(map(len, share.packs)), dtype=np.int64),
            "metrics": np.frombuffer(json.dumps(share.metrics).encode(), dtype=np.uint8),
        }
        return to_bytes(arrays)

    def _receive(self, payload: bytes) -> RankShare:
        """Keep the rows of a message of rank 0; return this rank's share."""
        assert isinstance(self.rows, RowsOfRank)
        arrays = safetensors.numpy.load(payload)
        indices, loss_mask = arrays["indices"], arrays["loss_mask"]
        tokens = self._tokens(indices)
        if isinstance(self.teacher, TeacherOfRank):
            self.teacher.is_here[tokens] = True
            for name in OF_TEACHER:
                getattr(self.teacher, name)[tokens] = arrays[name]
        for name, elsewhere in ELSEWHERE.items():
            values = self.numbers.of_tokens[name]
            arrays[name] = np.full(len(loss_mask), elsewhere, dtype=values.dtype)
            arrays[name][loss_mask] = values[tokens]
        for index, expected, row in zip(indices.tolist(), arrays["checksums"].tolist(), rows_of(arrays), strict=True):
            if _checksum(row) != expected:
                raise EvidenceError(
                    f"row {index} of the step, of rollout {row.rollout_id}, has changed on its way here"
                )
            self.rows.here[index] = row
        packs = np.split(arrays["pack_rows"], np.cumsum(arrays["pack_sizes"])[:-1])
        return RankShare(
            packs=tuple(tuple(pack.tolist()) for pack in packs), metrics=json.loads(arrays["metrics"].tobytes())
        )
