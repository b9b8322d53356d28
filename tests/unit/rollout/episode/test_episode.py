"""Episodes that hold several conversations: the calls of all of them are part of the rollout."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.environments.demo.calculator import CalculatorEnvironment
from lockstep.rollout.episode.environment import OpenConversation, Step
from lockstep.rollout.episode.episode import run_episode
from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.errors import ConfigError, ContextFullError, LockstepError
from lockstep.rollout.records import Cause, Message, RolloutStatus
from tests.fixtures.policies import Policy, play, sampling
from tests.fixtures.tokenizers import chat_tokenizer


@dataclass
class Debate:
    """Opens two more conversations on each turn of the first, with an edited history."""

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


async def test_conversations_with_edited_history_branch_and_are_trained():
    environment = Debate()
    rollout = await play(environment, Policy(lambda prompt: "aye " + prompt[-30:-25]), max_turns=2)
    assert rollout.outcome["voices"] == 4
    assert rollout.status is RolloutStatus.MAX_TURNS
    assert rollout.messages[-1] == {"role": "user", "content": "next"}
    assert len(rollout.calls) == 1 + 2 * (1 + 3)
    rows = rows_from_calls(rollout.calls)
    assert len(rows) == 6
    assert sum(row.num_trained for row in rows) == rollout.num_sampled
    before = len(rollout.calls)
    await asyncio.gather(*environment.kept, return_exceptions=True)
    assert len(rollout.calls) == before, "an answer after the end is not part of the rollout"
    with pytest.raises(LockstepError, match="episode is over"):
        await environment.opened[1].ask()


async def test_an_environment_can_catch_that_a_hosted_conversation_is_full():
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


async def test_a_conversation_answers_one_question_at_a_time():
    class Hasty(Debate):
        async def reset(self, example: Mapping[str, Any]) -> Sequence[Message]:
            voice = self.open([{"role": "user", "content": "go"}])
            await asyncio.gather(voice.ask(), voice.ask())
            return ()

    rollout = await play(Hasty(), Policy(lambda prompt: "aye"))
    assert rollout.status is RolloutStatus.FAILED
    assert "Hasty.reset raised RuntimeError in line" in str(rollout.error)
    assert "one thing at a time" in str(rollout.error)


class AsksOnce:
    """Asks in a hosted conversation whose prompt exceeds the context, in `step` or in `conclude`."""

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
async def test_a_hosted_conversation_that_fills_the_context_ends_the_episode_and_samples_are_kept(when, status):
    rollout = await play(AsksOnce(when), Policy(lambda prompt: "hello"))
    assert rollout.status is status
    assert len(rollout.calls) == 1
    assert rollout.is_trainable


async def test_equal_calls_in_two_turns_get_different_ids() -> None:
    class Asks:
        tools: Sequence[Mapping[str, Any]] = ()

        async def reset(self, example: Mapping[str, Any]) -> Sequence[Message]:
            return [{"role": "user", "content": "go"}]

        async def step(self, message: Message) -> Step:
            (call,) = message["tool_calls"]
            return Step(messages=({"role": "tool", "tool_call_id": call["id"], "content": "same"},))

    call = '<tool_call>{"name": "a", "arguments": {}}</tool_call>'
    rollout = await play(Asks(), Policy(lambda prompt: call), max_turns=3)
    ids = [message["tool_calls"][0]["id"] for message in rollout.messages if message.get("tool_calls")]
    assert len(set(ids)) == len(ids) == 3
    assert [message["tool_call_id"] for message in rollout.messages if message["role"] == "tool"] == ids


async def test_a_model_that_would_never_hear_of_its_tools_is_refused_before_it_samples():
    engine: Any = Policy(lambda prompt: "4")
    with pytest.raises(ConfigError, match=r"drops the tools \(calculator\)"):
        await run_episode(
            engine=engine,
            chat=Chat(chat_tokenizer("chatml")),
            environment=CalculatorEnvironment(),
            example={"question": "2+2"},
            sampling=sampling(),
            max_turns=1,
            rollout_id=0,
            group_id=0,
            seed=1,
        )


async def test_a_prompt_that_fills_the_context_says_so_with_the_settings() -> None:
    class Asks:
        tools: Sequence[Mapping[str, Any]] = ()

        async def reset(self, example: Mapping[str, Any]) -> Sequence[Message]:
            return [{"role": "user", "content": "go on " * 200}]

        async def step(self, message: Message) -> Step:
            return Step(done=True)

    rollout = await play(Asks(), Policy(lambda prompt: "aye", max_model_len=100))
    assert (rollout.status, rollout.dropped_by) == (RolloutStatus.CONTEXT_FULL, Cause.PROMPT)
    assert rollout.error is not None
    assert "prompt too long: the conversation has " in rollout.error
    assert "the model takes 100; raise rollout.max_model_len, or set data.max_prompt_tokens" in rollout.error
