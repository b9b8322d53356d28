"""Requests that fail in a live engine: their episodes are restarted, and partial groups are not trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.environments.single_turn import SingleTurn
from lockstep.rollout.errors import EngineError, EvidenceError, RequestError
from lockstep.rollout.records import EngineCall, ImageSpan, Rollout, RolloutStatus
from lockstep.rollout.sampler.sampler import REISSUES, Sampler
from tests.fixtures.gateway import ScriptedEngine
from tests.fixtures.tokenizers import chat_tokenizer

TOKENIZER = chat_tokenizer("qwen3")
ROWS = [{"prompt": f"row {number}", "answer": "1"} for number in range(3)]


class FaultyEngine(ScriptedEngine):
    """Fails the first requests with these seeds."""

    def __init__(self, failures: dict[int, int], error: Exception) -> None:
        super().__init__(script=lambda ids, sampling: [5 + (sampling.seed or 0) % 100] * 3)
        self.left = Counter(failures)
        self.fault = error

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, images: Sequence[ImageSpan] = ()
    ) -> EngineCall:
        assert sampling.seed is not None
        if self.left[sampling.seed] > 0:
            self.left[sampling.seed] -= 1
            raise self.fault
        return await super().generate(prompt_ids, sampling)


async def collect(failures: dict[int, int], error: Exception) -> tuple[list[Rollout], dict[str, float]]:
    engine = FaultyEngine(failures, error)
    sampler = Sampler(engine=engine, chat=Chat(TOKENIZER), make_environment=SingleTurn, max_turns=1, seed=0)
    rollouts = await sampler.collect(ROWS, samples_per_prompt=2, sampling=Sampling(max_tokens=8), step=0)
    return rollouts, sampler.take_metrics()


async def seeds() -> list[int]:
    """Return the seeds of the requests, in order of the rollouts."""
    engine = FaultyEngine({}, RuntimeError())
    sampler = Sampler(engine=engine, chat=Chat(TOKENIZER), make_environment=SingleTurn, max_turns=1, seed=0)
    await sampler.collect(ROWS, samples_per_prompt=2, sampling=Sampling(max_tokens=8), step=0)
    return [sampling.seed for sampling in engine.samplings if sampling.seed is not None]


async def test_a_restarted_episode_has_the_samples_of_a_run_without_faults() -> None:
    expected, none = await collect({}, RequestError("a fault"))
    found, metrics = await collect(dict.fromkeys((await seeds())[2:4], REISSUES), RequestError("a fault"))
    assert [rollout.calls for rollout in found] == [rollout.calls for rollout in expected]
    assert all(rollout.is_trainable for rollout in found)
    assert metrics == {"rollout/reissued": 2.0 * REISSUES, "rollout/groups_lost_to_engine": 0.0}
    assert set(none.values()) == {0.0}


async def test_the_group_of_an_episode_that_fails_every_time_is_left_out_and_counted() -> None:
    found, metrics = await collect({(await seeds())[3]: REISSUES + 1}, RequestError("a fault\nand a log"))
    assert [rollout.is_trainable for rollout in found] == [True, True, False, False, True, True]
    assert found[3].error == "RequestError: a fault"
    assert "another rollout of its group failed in the engine" in str(found[2].error)
    assert found[2].calls, "samples are kept in the saved rollouts"
    assert metrics == {"rollout/reissued": float(REISSUES), "rollout/groups_lost_to_engine": 1.0}


async def test_what_is_prepared_takes_the_place_of_each_rollout_when_it_has_ended() -> None:
    ended: list[int] = []

    def prepare(rollout: Rollout) -> Rollout:
        ended.append(rollout.rollout_id)
        return replace(rollout, duration_s=7.0)

    engine, seen = FaultyEngine({}, RuntimeError()), []
    sampler = Sampler(
        engine=engine, chat=Chat(TOKENIZER), make_environment=SingleTurn, max_turns=1, seed=0, prepare=prepare
    )
    found = await sampler.collect(
        ROWS, samples_per_prompt=2, sampling=Sampling(max_tokens=8), step=0, on_rollout=seen.append
    )
    assert sorted(ended) == [rollout.rollout_id for rollout in found] == list(range(6))
    assert {rollout.duration_s for rollout in (*found, *seen)} == {7.0}


async def test_refused_evidence_fails_its_own_rollout_only() -> None:
    """The request is not repeated, which would choose among answers (docs/tokens.md)."""
    found, metrics = await collect({(await seeds())[3]: 1}, EvidenceError("3 sampled tokens but 2 logprobs"))
    assert [rollout.status is RolloutStatus.FAILED for rollout in found] == [False, False, False, True, False, False]
    assert metrics["rollout/reissued"] == 0


async def test_a_dead_engine_ends_the_collection() -> None:
    with pytest.raises(EngineError, match="dead"):
        await collect({(await seeds())[3]: 1}, EngineError("the engine is dead"))
