"""Scores of a teacher: of the trained tokens of all rows, the same on every rank, and nothing else."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from lockstep.rollout.engine.token_scores import TokenScores, token_scores
from lockstep.rollout.errors import EvidenceError
from lockstep.rollout.records import TrainingRow
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.batch.teacher_scores import TeacherScores
from tests.fixtures.teachers import made_up_scores
from tests.unit.trainer.batch.test_step_batch import over_ranks, rollout


def batch() -> StepBatch:
    return StepBatch.of([rollout(i, sampled=2 + i) for i in range(3)], mask_truncated=False)


def scores_of(row: TrainingRow, *, version: int = 0, shift: int = 0) -> TokenScores:
    """Return scores with the logprob -id of each token, and as the most probable one the token before it."""
    ids = row.ids + shift
    flat = [pair for i in range(1, len(ids)) for pair in ((ids[i], -float(ids[i])), (ids[i - 1], -0.5 / i))]
    return token_scores(
        ids.tolist(), *zip(*flat, strict=True), top_k=1, version=version, vocab_size=512, source="the teacher"
    )


def test_the_scores_are_those_of_the_trained_tokens():
    made = batch()
    teacher = TeacherScores.of(made.rows, [scores_of(row, version=3) for row in made.rows], top_k=1)
    targets = [np.flatnonzero(row.loss_mask) for row in made.rows]
    sampled = np.concatenate([row.ids[target] for row, target in zip(made.rows, targets, strict=True)])
    before = np.concatenate([row.ids[target - 1] for row, target in zip(made.rows, targets, strict=True)])
    np.testing.assert_array_equal(teacher.logp, -sampled.astype(np.float32))
    np.testing.assert_array_equal(teacher.top_ids[:, 0], before)
    assert teacher.version.tolist() == [3]


def test_rows_without_trained_tokens_need_no_scores():
    made = batch()
    idle = replace(made.rows[0], loss_mask=np.zeros(len(made.rows[0]), bool))
    rows = [idle, *made.rows[1:]]
    teacher = TeacherScores.of(rows, [scores_of(row) for row in made.rows[1:]], top_k=1)
    assert len(teacher.logp) == made.layout.num_tokens - made.rows[0].num_trained
    assert TeacherScores.of([idle], [], top_k=4).top_ids.shape == (0, 4)


def test_scores_of_other_tokens_versions_or_sizes_are_refused():
    rows = batch().rows
    good = [scores_of(row) for row in rows]
    with pytest.raises(EvidenceError, match="other tokens than those of the row of rollout 0"):
        TeacherScores.of(rows, [scores_of(rows[0], shift=1), *good[1:]], top_k=1)
    with pytest.raises(EvidenceError, match=r"versions \[0, 1\], expected one"):
        TeacherScores.of(rows, [scores_of(rows[0], version=1), *good[1:]], top_k=1)
    with pytest.raises(EvidenceError, match="with top_k=2"):
        TeacherScores.of(rows, good, top_k=2)


def test_every_rank_gets_the_same_scores():
    made = batch()
    made = replace(made, teacher=made_up_scores(made, top_k=3, vocab_size=40))
    received = over_ranks(made).teacher
    assert received is not None
    for field in fields(TeacherScores):
        np.testing.assert_array_equal(getattr(received, field.name), getattr(made.teacher, field.name))
    assert over_ranks(batch()).teacher is None


def test_scores_of_another_number_of_tokens_are_refused():
    made = batch()
    teacher = made_up_scores(made, top_k=3, vocab_size=40)
    with pytest.raises(EvidenceError, match="8 tokens, 9 are trained"):
        replace(made, teacher=replace(teacher, **{n: getattr(teacher, n)[1:] for n in ("logp", "top_ids", "top_logp")}))
    with pytest.raises(EvidenceError, match="expected one row per trained token"):
        replace(teacher, top_ids=teacher.top_ids[1:])
    with pytest.raises(EvidenceError, match="has logprob nan; expected finite values"):
        replace(teacher, logp=np.full_like(teacher.logp, np.nan))
