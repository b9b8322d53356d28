"""The teacher of a run: all rows scored at once up to their last trained token, and its tokenizer checked."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rollout.engine.token_scores import TokenScores, token_scores
from rollout.errors import ConfigError, EngineError, EvidenceError
from rollout.system.background_loop import BackgroundLoop
from tests.fixtures.distributed import FakeRank
from tests.fixtures.tokenizers import chat_tokenizer
from tests.unit.trainer.batch.test_step_batch import rollout
from trainer.batch.step_batch import StepBatch
from trainer.config.schema import Config, TeacherConfig
from trainer.engines.teacher import Teacher, refuse_other_tokenizer


class FakeEngine:
    """An engine that answers when `expected` requests wait: logprob -id of each token, and token `named` as the most
    probable one."""

    def __init__(self, expected: int, named: int = 9) -> None:
        self.asked: list[tuple[list[int], int]] = []
        self.expected, self.named = expected, named
        self.all_wait = asyncio.Event()
        self.failure: Exception | None = None

    async def score_top(self, ids: Sequence[int], top_k: int) -> TokenScores:
        self.asked.append((list(ids), top_k))
        if len(self.asked) == self.expected:
            self.all_wait.set()
        await asyncio.wait_for(self.all_wait.wait(), 5)
        if self.failure is not None:
            raise self.failure
        flat = [pair for token in ids[1:] for pair in ((token, -float(token)), (self.named, -0.25))]
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
    scored = teacher(engine, loop).scored(made)
    assert engine.asked == [(row.ids[: int(np.flatnonzero(row.loss_mask)[-1]) + 1].tolist(), 1) for row in made.rows]
    assert scored.teacher is not None
    sampled = np.concatenate([row.ids[row.loss_mask] for row in made.rows])
    np.testing.assert_array_equal(scored.teacher.logp, -sampled.astype(np.float32))
    assert set(scored.teacher.top_ids.ravel()) == {9}


def test_ranks_without_an_engine_keep_their_batch(loop: BackgroundLoop) -> None:
    made = batch()
    assert teacher(None, loop).scored(made) is made


def test_failures_of_the_engine_and_tokens_unknown_to_the_student_end_the_step(loop: BackgroundLoop) -> None:
    with pytest.raises(EvidenceError, match="token 512 is none of the 512 ids of the student"):
        teacher(FakeEngine(expected=3, named=512), loop).scored(batch())
    engine = FakeEngine(expected=3)
    engine.failure = EngineError("the engine is dead")
    with pytest.raises(EngineError, match="the engine is dead"):
        teacher(engine, loop).scored(batch())


def test_a_teacher_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    chat_tokenizer("qwen3").save_pretrained(tmp_path / "student")
    chat_tokenizer("qwen3").save_pretrained(tmp_path / "equal")
    other = chat_tokenizer("qwen3")
    other.add_tokens(["<one more>"])
    other.save_pretrained(tmp_path / "other")

    def config(name: str | None) -> Config:
        made = Config(teacher=TeacherConfig(path=None if name is None else str(tmp_path / name)))
        made.model.path = str(tmp_path / "student")
        return made

    refuse_other_tokenizer(config(None))
    refuse_other_tokenizer(config("equal"))
    with pytest.raises(
        ConfigError, match=r"1 tokens differ, such as '<one more>' with id \d+ and None; set teacher.path"
    ):
        refuse_other_tokenizer(config("other"))
