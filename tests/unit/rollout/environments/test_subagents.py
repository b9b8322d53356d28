"""Conversations that an environment opens beside the episode's own: their calls are part of the rollout."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from rollout.engine.protocol import Sampling
from rollout.environments.calculator import calculator
from rollout.environments.mixed import Mixed
from rollout.environments.subagents import SubAgents
from rollout.episode.environment import OpenConversation, Step
from rollout.episode.rows import branch_count, rows_from_calls
from rollout.episode.token_metrics import token_metrics
from rollout.errors import ConfigError, ContextFullError, EngineError, EvidenceError, LockstepError
from rollout.records import EngineCall, FinishReason, Message, RolloutStatus
from tests.fixtures.gateway import ScriptedEngine
from tests.fixtures.policies import TOKENIZER, Policy, last_turn, play, tool_call


def two_tasks(prompt: str) -> str:
    """Delegates two tasks at once; each sub-agent calculates once and says what it got."""
    if "You are given one task" in prompt:
        task = "1+1" if "add ones" in prompt else "2*3"
        return f"it is {task}" if "tool_response" in last_turn(prompt) else tool_call("calculator", expression=task)
    if "tool_response" in last_turn(prompt):
        return "done"
    return tool_call("delegate", task="add ones") + "\n" + tool_call("delegate", task="multiply")


def slow_multiplication(prompt: str) -> float:
    return 0.02 if "multiply" in prompt and "given one task" in prompt else 0.0


async def test_two_sub_agents_interleave_and_every_token_is_trained_once():
    engine = Policy(two_tasks, delay_s=slow_multiplication)
    rollout = await play(SubAgents([calculator]), engine)
    assert rollout.status is RolloutStatus.COMPLETED
    assert len(rollout.calls) == 6
    assert engine.most_at_once == 2
    tools = [turn["content"] for turn in rollout.messages if turn["role"] == "tool"]
    assert tools == ["it is 1+1", "it is 2*3"], "results in the order of the calls, whoever was first"
    rows = rows_from_calls(rollout.calls)
    assert len(rows) == 3
    assert sum(row.num_trained for row in rows) == rollout.num_sampled
    metrics = token_metrics(rollout.calls, rows)
    assert metrics["rollout/token_match_rate"] == metrics["rollout/trained_fraction"] == 1.0
    assert rollout.outcome["agents"] == 2
    assert rollout.outcome["agent_tool_calls"] == 2
    assert rollout.outcome["tool_calls"] == 2


async def test_seeds_do_not_depend_on_who_is_answered_first():
    fast_first, slow_first = Policy(two_tasks, delay_s=slow_multiplication), Policy(two_tasks)
    arrived = [
        [call.prompt_ids for call in (await play(SubAgents([calculator]), engine)).calls]
        for engine in (fast_first, slow_first)
    ]
    assert arrived[0] != arrived[1], "the delay must change the order of arrival"
    assert fast_first.seeds == slow_first.seeds
    assert len(set(fast_first.seeds.values())) == 6
    other = Policy(two_tasks)
    await play(SubAgents([calculator]), other, seed=2)
    assert not set(other.seeds.values()) & set(fast_first.seeds.values())


async def test_the_main_conversation_is_seeded_alike_with_and_without_others():
    plain, hosting = Policy(lambda prompt: "done"), Policy(two_tasks)
    await play(SubAgents([calculator]), plain)
    await play(SubAgents([calculator]), hosting)
    (first,) = plain.seeds
    assert plain.seeds[first] == hosting.seeds[first]


@pytest.mark.parametrize(
    ("settings", "says", "calls"),
    [
        ({"max_agent_turns": 1}, "did not finish in 1 turns", 4),
        ({"max_calls": 3}, "3 engine calls", 3),
    ],
)
async def test_a_sub_agent_at_its_limit_is_a_tool_error(settings, says, calls):
    rollout = await play(SubAgents([calculator], **settings), Policy(two_tasks))
    errors = [turn["content"] for turn in rollout.messages if turn["role"] == "tool"]
    assert all(error.startswith("error: ") for error in errors)
    assert says in " ".join(errors)
    assert rollout.outcome["tool_errors_exception"] == 2
    assert len(rollout.calls) == calls
    assert rollout.status is (RolloutStatus.MAX_TURNS if "max_calls" in settings else RolloutStatus.COMPLETED)
    assert sum(row.num_trained for row in rows_from_calls(rollout.calls)) == rollout.num_sampled > 0


async def test_a_sub_agent_that_is_too_slow_is_a_timeout_for_who_delegated():
    environment = SubAgents([calculator], agent_timeout_s=0.05)
    rollout = await play(environment, Policy(two_tasks, delay_s=lambda prompt: 5 * slow_multiplication(prompt)))
    assert rollout.outcome["tool_errors_timeout"] == 1
    assert rollout.status is RolloutStatus.COMPLETED
    assert sum(row.num_trained for row in rows_from_calls(rollout.calls)) == rollout.num_sampled > 0


async def test_bad_evidence_of_a_sub_agent_fails_the_rollout_though_the_tool_caught_it():
    bad = EvidenceError("logprobs are missing")
    engine = Policy(two_tasks, fails=lambda prompt: bad if "add ones" in prompt and "given one" in prompt else None)
    rollout = await play(SubAgents([calculator]), engine)
    assert rollout.status is RolloutStatus.FAILED
    assert rollout.error == "EvidenceError: logprobs are missing"


async def test_a_dead_engine_is_not_a_tool_error():
    engine = Policy(two_tasks, fails=lambda prompt: EngineError("dead") if "given one task" in prompt else None)
    with pytest.raises(EngineError, match="dead"):
        await play(SubAgents([calculator]), engine)


async def test_mixed_hands_conversations_to_the_part_that_hosts():
    def mixed() -> Mixed:
        return Mixed({"subagents": {"functions": [calculator], "max_calls": 3}, "user": {"turns": ["and?"] * 5}})

    hosted = await play(mixed(), Policy(two_tasks), example={"question": "go", "environment": "subagents"})
    assert len(hosted.calls) == 3
    plain = await play(
        mixed(), Policy(lambda prompt: "hm"), max_turns=6, example={"question": "go", "environment": "user"}
    )
    assert len(plain.calls) == 6, "another part's limit of calls is not this one's"


def test_limits_below_one_are_refused():
    with pytest.raises(ConfigError, match="max_calls=0"):
        SubAgents([calculator], max_calls=0)


# --- the protocol, by an environment of one's own


@dataclass
class Debate:
    """Two more voices of the same model speak on each turn of the first; what they hear is not what it said."""

    max_calls: int | None = None
    opened: list[Any] = field(default_factory=list)
    kept: list[asyncio.Task[Message]] = field(default_factory=list)
    tools: Sequence[Mapping[str, Any]] = ()

    def host(self, open_conversation: OpenConversation) -> None:
        self.open = open_conversation

    async def reset(self, example: Mapping[str, Any]) -> Sequence[Message]:
        opener = self.open([{"role": "user", "content": "open the debate"}])
        said = await opener.ask()
        return [{"role": "user", "content": said["content"]}]

    async def step(self, message: Message) -> Step:
        edited = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "forged"}]
        voices = [self.open([*edited, {"role": "user", "content": f"voice {len(self.opened) + i}"}]) for i in range(2)]
        self.opened += voices
        await asyncio.gather(*(voice.ask() for voice in voices))
        await voices[0].ask([{"role": "user", "content": "again"}])
        return Step(messages=({"role": "user", "content": "next"},))

    async def conclude(self) -> Mapping[str, Any]:
        self.kept.append(asyncio.create_task(self.opened[0].ask([{"role": "user", "content": "too late"}])))
        await asyncio.sleep(0)
        return {"voices": len(self.opened)}


async def test_own_conversations_with_edited_history_branch_and_are_trained():
    environment = Debate()
    rollout = await play(environment, Policy(lambda prompt: "aye " + prompt[-30:-25]), max_turns=2)
    assert rollout.outcome["voices"] == 4
    assert rollout.status is RolloutStatus.MAX_TURNS
    assert rollout.messages[-1] == {"role": "user", "content": "next"}
    assert len(rollout.calls) == 1 + 2 * (1 + 3)
    assert branch_count(rollout.calls) == 5
    rows = rows_from_calls(rollout.calls)
    assert sum(row.num_trained for row in rows) == rollout.num_sampled
    before = len(rollout.calls)
    await asyncio.gather(*environment.kept, return_exceptions=True)
    assert len(rollout.calls) == before, "what is answered after the end is not part of the rollout"
    with pytest.raises(LockstepError, match="episode is over"):
        await environment.opened[1].ask()


async def test_a_hosted_conversation_that_is_full_says_so_and_the_episode_goes_on():
    caught = []

    class Filling(Debate):
        async def reset(self, example: Mapping[str, Any]) -> Sequence[Message]:
            return [{"role": "user", "content": "go"}]

        async def step(self, message: Message) -> Step:
            try:
                await self.open([{"role": "user", "content": "long " * 400}]).ask()
            except ContextFullError as error:
                caught.append(str(error))
            return Step(done=True)

        async def conclude(self) -> Mapping[str, Any]:
            return {}

    rollout = await play(Filling(), Policy(lambda prompt: "aye", max_model_len=300))
    assert rollout.status is RolloutStatus.COMPLETED
    assert "the model takes 300" in caught[0]


async def test_a_conversation_is_asked_one_thing_at_a_time():
    class Hasty(Debate):
        async def reset(self, example: Mapping[str, Any]) -> Sequence[Message]:
            voice = self.open([{"role": "user", "content": "go"}])
            await asyncio.gather(voice.ask(), voice.ask())
            return ()

    with pytest.raises(RuntimeError, match="one thing at a time"):
        await play(Hasty(), Policy(lambda prompt: "aye"))


async def test_an_aborted_call_of_a_hosted_conversation_fails_the_rollout():
    class Aborting(Policy):
        async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> EngineCall:
            engine = ScriptedEngine(lambda *_: (5,), finish=FinishReason.ABORT)
            if "given one task" in str(TOKENIZER.decode(list(prompt_ids))):
                return await engine.generate(prompt_ids, sampling)
            return await super().generate(prompt_ids, sampling)

    rollout = await play(SubAgents([calculator]), Aborting(two_tasks))
    assert rollout.status is RolloutStatus.FAILED
    assert "aborted" in (rollout.error or "")


class AsksOnce:
    """Asks in a conversation of its own whose prompt fills the context, while it steps or when it concludes."""

    tools = ()
    max_calls = 10

    def __init__(self, when: str) -> None:
        self._when = when

    def host(self, open_conversation: OpenConversation) -> None:
        self._open = open_conversation

    async def reset(self, example: Mapping[str, Any]) -> Sequence[Message]:
        return [{"role": "user", "content": "begin"}]

    async def step(self, message: Message) -> Step:
        if self._when == "step":
            await self._ask()
        return Step(done=True)

    async def conclude(self) -> Mapping[str, Any]:
        if self._when == "conclude":
            await self._ask()
        return {}

    async def _ask(self) -> None:
        await self._open([{"role": "user", "content": "what a long story " * 2000}]).ask()


@pytest.mark.parametrize(
    ("when", "status"), [("step", RolloutStatus.CONTEXT_FULL), ("conclude", RolloutStatus.COMPLETED)]
)
async def test_a_conversation_beside_that_fills_the_context_ends_the_episode_and_what_was_sampled_stays(when, status):
    rollout = await play(AsksOnce(when), Policy(lambda prompt: "hello"))
    assert rollout.status is status
    assert len(rollout.calls) == 1
    assert rollout.is_trainable
