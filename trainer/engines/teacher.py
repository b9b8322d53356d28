"""The teacher of a run: a model in an engine, which scores the tokens that the student sampled.

    rows of a step ─► teacher's engine, all rows at once ─► logprobs, most probable tokens ─► StepBatch.teacher

Rank 0 talks to it, and all ranks get its scores with the rows. It scores token ids, so student and teacher must have
one vocabulary. It computes the student's whole row, prompt included, at temperature 1, as engines score prompts. The
prompt may have a context that the student did not see (teacher_prompts.py); then the policy itself, in the engines from
which rank 0 samples, can be the teacher.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from lockstep.rollout.engine.protocol import Engine, SyncedEngine
from lockstep.rollout.engine.token_scores import TokenScores
from lockstep.rollout.errors import EvidenceError
from lockstep.rollout.records import Rollout, TrainingRow
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.batch.teacher_scores import TeacherRow, TeacherScores
from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.engines.teacher_prompts import TeacherPrompts
from lockstep.trainer.objective.distillation.sampled import teacher_floor

FLOOR_ROWS = 8
"""Largest number of rows that are scored twice for the noise floor."""


class Teacher:
    """Scorer of the rows of a step."""

    def __init__(
        self,
        engine: Engine | None,
        *,
        distributed: Distributed,
        loop: BackgroundLoop,
        top_k: int,
        vocab_size: int,
        prompts: TeacherPrompts | None = None,
        is_policy: bool = False,
        synced: Sequence[SyncedEngine] = (),
        measured: Mapping[str, float] | None = None,
    ) -> None:
        """
        Args:
            engine: None on ranks other than 0.
            top_k: most probable tokens at each position.
            vocab_size: the student's number of ids.
            prompts: None if it sees what the student saw.
            is_policy: True if the engine is the student's, which samples on.
            synced: engines of this rank that get their weights from the run (averaged_teacher.py).
            measured: metrics of its mismatch that are known at the start.
        """
        self._engine = engine
        self._distributed = distributed
        self._loop = loop
        self._top_k = top_k
        self._vocab_size = vocab_size
        self._prompts = prompts
        self._is_policy = is_policy
        self.synced = synced
        self.measured: Mapping[str, float] = measured or {}
        """Metrics of its scores: its mismatch with itself and with transformers as last measured, and the share of the
        step's rollouts for which it had a context."""
        self._is_measured = False

    def scored(self, batch: StepBatch, rollouts: Sequence[Rollout], *, measures_floor: bool = False) -> StepBatch:
        """Return the batch of rank 0 with the teacher's scores; a collective.

        rollouts: of the batch. measures_floor: score some rows again, one after another; the first step with rows does
        so anyway. Raises on all ranks what a request raises, and `EvidenceError` for scores of other tokens.
        """
        return self._distributed.together(lambda: self._scored(batch, rollouts, measures_floor))

    def close(self) -> None:
        """Release the engine, unless it is the student's."""
        if self._engine is not None and not self._is_policy:
            self._loop.run(self._engine.close())

    def _scored(self, batch: StepBatch, rollouts: Sequence[Rollout], measures_floor: bool) -> StepBatch:
        if self._engine is None:
            return batch
        rows = [row for row in batch.rows if row.num_trained]
        if self._prompts is None:
            inputs = [TeacherRow.plain(row) for row in rows]
        else:
            inputs, share = self._prompts.rows(rows, rollouts)
            self.measured = {**self.measured, "teacher/with_context": share}
        scores = self._loop.run(self._score_all(self._engine, inputs))
        outside = [one.top_ids.max() for one in scores if one.top_ids.size and one.top_ids.max() >= self._vocab_size]
        if outside:
            raise EvidenceError(
                f"teacher: its most probable token {outside[0]} is none of the {self._vocab_size} ids of the student"
            )
        if rows and (measures_floor or not self._is_measured):
            self.measured = {**self.measured, **self._floor(self._engine, rows, inputs, scores)}
            self._is_measured = True
        return replace(batch, teacher=TeacherScores.of(batch.rows, scores, top_k=self._top_k, computed=inputs))

    def _floor(
        self,
        engine: Engine,
        rows: Sequence[TrainingRow],
        computed: Sequence[TeacherRow],
        scores: Sequence[TokenScores],
    ) -> dict[str, float]:
        """Score some rows again and return the mismatch with their scores."""
        indices = np.unique(np.linspace(0, len(rows) - 1, FLOOR_ROWS).round().astype(int)).tolist()
        again = self._loop.run(self._score_alone(engine, [computed[index] for index in indices]))

        def logprobs(found: Sequence[TokenScores]) -> torch.Tensor:
            places = [np.flatnonzero(rows[index].loss_mask) + computed[index].shift - 1 for index in indices]
            parts = [one.logprobs[place] for one, place in zip(found, places, strict=True)]
            return torch.from_numpy(np.concatenate(parts))

        return teacher_floor(logprobs([scores[index] for index in indices]), logprobs(again))

    async def _score_all(self, engine: Engine, rows: Sequence[TeacherRow]) -> list[TokenScores]:
        return await asyncio.gather(*(engine.score_top(row.ids.tolist(), self._top_k, row.images) for row in rows))

    async def _score_alone(self, engine: Engine, rows: Sequence[TeacherRow]) -> list[TokenScores]:
        return [await engine.score_top(row.ids.tolist(), self._top_k, row.images) for row in rows]
