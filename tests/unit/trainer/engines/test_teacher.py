"""The teacher of a run: all rows scored at once up to their last trained token, and its noise floor."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from lockstep.rollout.engine.token_scores import TokenScores, token_scores
from lockstep.rollout.errors import EngineError, EvidenceError
from lockstep.rollout.records import ImageSpan
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.engines.teacher import Teacher
from tests.fixtures.distributed import FakeRank
from tests.unit.trainer.batch.test_step_batch import rollout


class FakeEngine:
    """An engine that answers when `expected` requests wait: logprob -id of each token, and token `named` as the most
    probable one."""

    def __init__(self, expected: int, named: int = 9) -> None:
        self.asked: list[tuple[list[int], int]] = []
        self.images: list[Sequence[ImageSpan]] = []
        self.expected, self.named = expected, named
        self.all_wait = asyncio.Event()
        self.failure: Exception | None = None
        self.drift = 0.0
        """Added to the logprobs after every request."""

    async def score_top(self, ids: Sequence[int], top_k: int, images: Sequence[ImageSpan] = ()) -> TokenScores:
        self.asked.append((list(ids), top_k))
        self.images.append(images)
        drift = -self.drift * len(self.asked)
        if len(self.asked) == self.expected:
            self.all_wait.set()
        await asyncio.wait_for(self.all_wait.wait(), 5)
        if self.failure is not None:
            raise self.failure
        flat = [pair for token in ids[1:] for pair in ((token, drift - float(token)), (self.named, -0.25))]
        return token_scores(ids, *zip(*flat, strict=True), top_k=top_k, version=0, vocab_size=10**6, source="it")


@pytest.fixture
def loop() -> Iterator[BackgroundLoop]:
    with BackgroundLoop() as loop:
        yield loop


def teacher(engine: FakeEngine | None, loop: BackgroundLoop) -> Teacher:
    return Teacher(engine, distributed=FakeRank(), loop=loop, top_k=1, vocab_size=512)  # type: ignore[arg-type]


def batch() -> StepBatch:
    made = StepBatch.of([rollout(i, sampled=2 + i) for i in range(3)], mask_truncated=False)
    # The last token of the first row was not sampled.
    mask = made.rows[0].loss_mask.copy()
    mask[-1] = False
    return replace(made, rows=(replace(made.rows[0], loss_mask=mask), *made.rows[1:]))


def test_all_rows_are_scored_at_once_up_to_their_last_trained_token(loop: BackgroundLoop) -> None:
    engine, made = FakeEngine(expected=3), batch()
    scored = teacher(engine, loop).scored(made, [])
    at_once = [(row.ids[: int(np.flatnonzero(row.loss_mask)[-1]) + 1].tolist(), 1) for row in made.rows]
    assert engine.asked == [*at_once, *at_once], "and once more, alone"
    assert scored.teacher is not None
    sampled = np.concatenate([row.ids[row.loss_mask] for row in made.rows])
    np.testing.assert_array_equal(scored.teacher.logp, -sampled.astype(np.float32))
    assert set(scored.teacher.top_ids.ravel()) == {9}


def test_the_images_before_the_last_trained_token_of_a_row_go_with_it(loop: BackgroundLoop) -> None:
    engine, made = FakeEngine(expected=3), batch()
    seen, late = (ImageSpan(start=place, end=place + 1, digest=str(place) * 64) for place in (0, 4))
    rows = (replace(made.rows[0], images=(seen, late)), *made.rows[1:])
    assert int(np.flatnonzero(rows[0].loss_mask)[-1]) < late.start < len(rows[0])
    teacher(engine, loop).scored(replace(made, rows=rows), [])
    assert engine.images == [(seen,), (), ()] * 2


def test_the_noise_floor_compares_scores_of_the_same_tokens_in_two_batches(loop: BackgroundLoop) -> None:
    engine, made = FakeEngine(expected=3), batch()
    measured = teacher(engine, loop)
    measured.scored(made, [])
    assert measured.measured == {"teacher/noise_floor_kl": 0.0, "teacher/noise_floor_k3": 0.0}
    engine.drift = 0.25
    measured.scored(made, [])
    assert len(engine.asked) == 9, "the floor is measured once, unless it is asked for"
    measured.scored(made, [], measures_floor=True)
    assert measured.measured["teacher/noise_floor_kl"] == pytest.approx(0.75), "each row again, three requests later"
    assert measured.measured["teacher/noise_floor_k3"] == pytest.approx(np.expm1(-0.75) + 0.75, rel=1e-5)


def test_a_step_without_rows_measures_no_floor(loop: BackgroundLoop) -> None:
    measured = teacher(FakeEngine(expected=1), loop)
    measured.scored(StepBatch.of([], mask_truncated=False), [])
    assert measured.measured == {}


def test_ranks_without_an_engine_keep_their_batch(loop: BackgroundLoop) -> None:
    made = batch()
    assert teacher(None, loop).scored(made, []) is made


def test_failures_of_the_engine_and_tokens_unknown_to_the_student_end_the_step(loop: BackgroundLoop) -> None:
    with pytest.raises(EvidenceError, match="token 512 is none of the 512 ids of the student"):
        teacher(FakeEngine(expected=3, named=512), loop).scored(batch(), [])
    engine = FakeEngine(expected=3)
    engine.failure = EngineError("the engine is dead")
    with pytest.raises(EngineError, match="the engine is dead"):
        teacher(engine, loop).scored(batch(), [])
