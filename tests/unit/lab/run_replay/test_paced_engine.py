"""The engine of a replay: one request per version, in the order of the versions, and the first difference by name."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from lockstep.lab.run_replay.paced_engine import ROLLOUT, Difference, PacedEngine
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.records import EngineCall, FinishReason, Rollout, SamplingSupport, VersionSpan

PROMPT = (1, 2, 3)
IDS = (10, 11, 12, 13, 14, 15)


def record(prompt: Sequence[int] = PROMPT, **changes: Any) -> EngineCall:
    """Return a call that two syncs interrupted: weights 3, 4 and 6."""
    spans = tuple(VersionSpan(version=v, start=s, end=e) for v, s, e in ((3, 0, 2), (4, 2, 2), (4, 2, 5), (6, 5, 6)))
    support = SamplingSupport(offsets=np.arange(0, 14, 2), token_ids=np.array([(i, i + 50) for i in IDS]).flatten())
    fields = {
        "prompt_ids": tuple(prompt), "sampled_ids": IDS, "sampled_logprobs": tuple(-0.1 * i for i in IDS),
        "finish_reason": FinishReason.STOP, "version_spans": spans, "support": support,
    }  # fmt: skip
    return EngineCall(**fields | changes)


class Weights:
    """An engine with a version, that samples the tokens of `record` after what has been drawn."""

    max_model_len = 100

    def __init__(self, **changes: Any) -> None:
        self.version = 0
        self.requests: list[tuple[int, int, int, tuple[int, ...]]] = []
        self.whole = record(**changes)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, images: Sequence[Any] = ()) -> EngineCall:
        self.requests.append((self.version, sampling.drawn, sampling.max_tokens, tuple(prompt_ids)))
        await asyncio.sleep(0)
        start = sampling.drawn
        end = min(start + sampling.max_tokens, len(self.whole.sampled_ids))
        assert self.whole.support is not None
        return EngineCall(
            prompt_ids=tuple(prompt_ids),
            sampled_ids=self.whole.sampled_ids[start:end],
            sampled_logprobs=self.whole.sampled_logprobs[start:end],
            finish_reason=FinishReason.LENGTH if end < 6 else self.whole.finish_reason,
            version_spans=(VersionSpan(version=self.version, start=0, end=end - start),),
            support=SamplingSupport(
                offsets=np.arange(0, 2 * (end - start) + 1, 2),
                token_ids=self.whole.support.token_ids[2 * start : 2 * end],
            ),
        )


def replay(
    engine: Weights, *, recorded: Sequence[EngineCall] = (record(),), prompts: Sequence[Sequence[int]] = (PROMPT,)
) -> list[EngineCall]:
    """Play one episode under the weights 3, 4, 5, 6, and return its calls."""

    async def play() -> list[EngineCall]:
        paced = PacedEngine(engine, patience_s=0.3)  # type: ignore[arg-type]
        paced.expect([Rollout(rollout_id=8, group_id=2, calls=tuple(recorded))])

        async def episode() -> list[EngineCall]:
            ROLLOUT.set(8)
            calls = [await paced.generate(prompt, Sampling(max_tokens=20, seed=1)) for prompt in prompts]
            await paced.ended(Rollout(rollout_id=8, group_id=2, calls=tuple(calls)))
            return calls

        task = asyncio.create_task(episode())
        try:
            for version in (3, 4, 5, 6):
                engine.version = version
                await paced.advance(version)
                await asyncio.wait_for(paced.settled(), 5)
            return await asyncio.wait_for(paced.unless_different(_result(task)), 5)
        finally:
            task.cancel()

    async def _result(task: asyncio.Task[list[EngineCall]]) -> list[EngineCall]:
        return await task

    return asyncio.run(play())


def test_an_interrupted_call_is_one_request_per_version() -> None:
    engine = Weights()
    (call,) = replay(engine)
    assert (call.sampled_ids, call.version_spans) == (IDS, record().version_spans)
    assert engine.requests == [
        (3, 0, 2, PROMPT),
        (4, 2, 3, PROMPT + IDS[:2]),
        (6, 5, 15, PROMPT + IDS[:5]),
    ]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"sampled_ids": (10, 11, 12, 99, 14, 15), "support": None}, "call 1, position 3: token 99, in the run 13"),
        ({"sampled_logprobs": (-1.0, -1.1, -1.2, -1.3, -1.4, -1.5 + 1e-15)}, "position 5: logprob"),
        ({"finish_reason": FinishReason.LENGTH}, "end by length, in the run by stop"),
    ],
)
def test_the_first_difference_is_named(changes: dict[str, Any], sentence: str) -> None:
    logprobs = {"sampled_logprobs": (-1.0, -1.1, -1.2, -1.3, -1.4, -1.5)}
    engine = Weights(**logprobs)
    if "support" in changes:
        changes["support"] = SamplingSupport(
            offsets=np.arange(0, 14, 2), token_ids=np.array([(i, i + 50) for i in changes["sampled_ids"]]).flatten()
        )
    engine.whole = record(**logprobs | changes)
    with pytest.raises(Difference, match=sentence):
        replay(engine, recorded=[record(**logprobs)])


def test_another_support_is_a_difference() -> None:
    engine = Weights()
    token_ids = np.array([(i, i + 50) for i in IDS]).flatten()
    token_ids[9] = 77
    engine.whole = record(support=SamplingSupport(offsets=np.arange(0, 14, 2), token_ids=token_ids))
    with pytest.raises(Difference, match=r"position 4: support \[14, 77\], in the run \[14, 64\]"):
        replay(engine)


def test_another_prompt_names_the_position() -> None:
    with pytest.raises(Difference, match="rollout 8, call 1, position 2 of the prompt"):
        replay(Weights(), prompts=[(1, 2, 4)])


def test_a_call_more_and_a_call_less_are_differences() -> None:
    with pytest.raises(Difference, match="rollout 8 asks once more than in the run"):
        replay(Weights(), prompts=[PROMPT, PROMPT])
    late = (VersionSpan(version=6, start=0, end=6),)
    with pytest.raises(Difference, match=r"rollout 8 ends .*, in the run call 2 follows"):
        replay(Weights(), recorded=[record(), record(prompt=(5,), version_spans=late)])


def test_a_record_that_cannot_be_followed_ends_the_replay() -> None:
    with pytest.raises(Difference, match=r"no token was sampled for 0\.3 s"):
        replay(Weights(), recorded=[record(), record(prompt=(5,))], prompts=[PROMPT, (5,)])


def test_calls_of_an_episode_are_found_by_their_prompts() -> None:
    engine = Weights()
    spans = (VersionSpan(version=3, start=0, end=6),)
    recorded = [record(prompt=(5,), version_spans=spans), record(version_spans=spans)]
    assert [call.prompt_ids for call in replay(engine, recorded=recorded, prompts=[PROMPT, (5,)])] == [PROMPT, (5,)]
