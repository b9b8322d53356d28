"""Sampled turns of a conversation: recorded by the calls, whatever roles the prompt has."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from lockstep.rollout.environments import make_environment
from lockstep.rollout.environments.demo.calculator import calculator
from lockstep.rollout.environments.single_turn import SingleTurn
from lockstep.rollout.environments.subagents import SubAgents
from lockstep.rollout.environments.tools import ToolEnvironment
from lockstep.rollout.environments.user import SimulatedUser
from lockstep.rollout.errors import DataError, EvidenceError
from lockstep.rollout.records import ImageSpan, Rollout, RolloutStatus
from lockstep.rollout.sampler.sampler import Sampler
from lockstep.rollout.saved_rollouts import from_json, read_rollouts, to_json, write_rollouts
from tests.fixtures.gateway import ScriptedEngine, says
from tests.fixtures.policies import CHAT, TOKENIZER, Policy, last_turn, play, sampling, tool_call

SYSTEM = {"role": "system", "content": "Solve it."}
CALLED = {"id": "e1", "type": "function", "function": {"name": "calculator", "arguments": '{"expression": "2+2"}'}}
EXAMPLES = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "It is 2."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "", "tool_calls": [CALLED]},
    {"role": "tool", "tool_call_id": "e1", "name": "calculator", "content": "4"},
    {"role": "assistant", "content": "It is 4."},
]
ASKED = {"role": "user", "content": "3+4?"}
PROMPTS: dict[str, dict[str, Any]] = {
    "a text": {"prompt": "3+4?"},
    "messages": {"messages": [SYSTEM, ASKED]},
    "worked examples": {"messages": [SYSTEM, *EXAMPLES, ASKED]},
    "examples alone": {"prompt": [*EXAMPLES, ASKED]},
    "a greeting first": {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "Hi"}, ASKED]},
}


def texts(rollout: Rollout) -> list[str]:
    return [turn["content"] for turn in rollout.sampled_turns]


def prompt_of(rollout: Rollout) -> list[Mapping[str, Any]]:
    return list(rollout.example.get("messages") or rollout.example["prompt"])


@pytest.mark.parametrize("name", PROMPTS)
async def test_one_turn_is_the_completion_whatever_the_prompt_is(name: str) -> None:
    rollout = await play(SingleTurn(), Policy(lambda prompt: "7"), example=PROMPTS[name])
    assert (texts(rollout), rollout.answer, rollout.completion) == (["7"], "7", rollout.messages[-1:])
    assert rollout.num_prompt_messages == len(rollout.messages) - 1
    assert rollout.num_example_messages == {"worked examples": 7, "examples alone": 6, "a greeting first": 2}.get(
        name, 0
    )


@pytest.mark.parametrize("name", PROMPTS)
async def test_tool_turns_and_results_are_the_completion(name: str) -> None:
    def answer(prompt: str) -> str:
        return "It is 7." if "tool_response" in last_turn(prompt) else tool_call("calculator", expression="3+4")

    rollout = await play(ToolEnvironment([calculator]), Policy(answer), example=PROMPTS[name])
    assert [turn["role"] for turn in rollout.completion] == ["assistant", "tool", "assistant"]
    assert rollout.sampled_at == (len(rollout.prompt), len(rollout.prompt) + 2)
    assert rollout.sampled_turns[0]["tool_calls"][0]["function"]["arguments"] == '{"expression": "3+4"}'
    assert rollout.answer == "It is 7."


@pytest.mark.parametrize("name", PROMPTS)
async def test_a_simulated_user_speaks_within_the_completion(name: str) -> None:
    rollout = await play(
        SimulatedUser(turns=["sure?"]), Policy(lambda p: "7" if "sure" in p else "6"), example=PROMPTS[name]
    )
    assert [(turn["role"], turn["content"]) for turn in rollout.completion] == [
        ("assistant", "6"), ("user", "sure?"), ("assistant", "7"),
    ]  # fmt: skip
    assert texts(rollout) == ["6", "7"]


def delegating(prompt: str) -> str:
    if "You are given one task" in prompt:
        return "sub answer" if "tool_response" in last_turn(prompt) else tool_call("calculator", expression="1+1")
    return "done" if "tool_response" in last_turn(prompt) else tool_call("delegate", task="a")


@pytest.mark.parametrize("is_recorded", [True, False], ids=["recorded", "a file of an earlier version"])
@pytest.mark.parametrize("name", PROMPTS)
async def test_calls_of_sub_agents_are_in_no_message(name: str, is_recorded: bool) -> None:
    rollout = await play(SubAgents([calculator]), Policy(delegating), example=PROMPTS[name])
    if not is_recorded:
        rollout = old(rollout)
    assert rollout.num_turns == 4
    assert [place is None for place in rollout.places] == [False, True, True, False]
    assert [turn["role"] for turn in rollout.completion] == ["assistant", "tool", "assistant"]
    assert texts(rollout) == ["", "done"]


def old(rollout: Rollout) -> Rollout:
    """Read the rollout as an earlier version saved it."""
    data = json.loads(json.dumps(to_json(rollout, shares_prompts=True)))
    del data["call_messages"]
    return from_json(data)


class Critic(SingleTurn):
    """Asks the model about its answer in a conversation of its own, before and after the episode's own turn."""

    max_calls = None

    def host(self, open_conversation: Any) -> None:
        self._open = open_conversation

    async def reset(self, example: Mapping[str, Any]) -> Any:
        await self._open([{"role": "user", "content": "plan"}]).ask()
        return await super().reset(example)

    async def conclude(self) -> Mapping[str, Any]:
        await self._open([{"role": "user", "content": "judge yourself"}]).ask()
        return {}


@pytest.mark.parametrize("name", PROMPTS)
async def test_critics_before_and_after_the_own_turn_are_in_no_message(name: str) -> None:
    rollout = await play(Critic(), Policy(lambda p: "7" if "3+4?" in p else "aside"), example=PROMPTS[name])
    assert rollout.places == (None, len(rollout.messages) - 1, None)
    assert texts(rollout) == ["7"]


@pytest.mark.parametrize("name", PROMPTS)
async def test_nothing_was_sampled_where_the_episode_failed_before(name: str) -> None:
    fails = Policy(lambda p: "7", fails=lambda p: EvidenceError("logprobs are missing"))
    rollout = await play(SingleTurn(), fails, example=PROMPTS[name])
    full = await play(SingleTurn(), Policy(lambda p: "7", max_model_len=2), example=PROMPTS[name])
    assert (rollout.status, full.status) == (RolloutStatus.FAILED, RolloutStatus.CONTEXT_FULL)
    for one in (rollout, full, old(full)):
        assert one.prompt == one.messages != ()
        assert (one.completion, one.sampled_turns, one.answer) == ((), (), "")


async def test_an_aborted_call_is_in_no_message() -> None:
    from lockstep.rollout.records import EngineCall, FinishReason

    class Aborting(Policy):
        async def generate(self, prompt_ids: Any, sampling: Any, images: Sequence[ImageSpan] = ()) -> EngineCall:
            call = await super().generate(prompt_ids, sampling)
            return replace(call, finish_reason=FinishReason.ABORT)

    rollout = await play(SingleTurn(), Aborting(lambda p: "7"), example=PROMPTS["worked examples"])
    assert (rollout.num_turns, rollout.places, old(rollout).places) == (1, (None,), (None,))


@pytest.mark.parametrize("name", PROMPTS)
async def test_saved_rollouts_keep_it_and_older_files_are_inferred(name: str, tmp_path: Path) -> None:
    rollout = await play(SimulatedUser(turns=["sure?"]), Policy(lambda p: "7"), example=PROMPTS[name])
    write_rollouts(tmp_path / "step-000001.jsonl", [rollout])
    (read,) = read_rollouts(tmp_path / "step-000001.jsonl")
    assert (read.call_messages, read.places) == (rollout.call_messages, rollout.places)
    assert old(rollout).call_messages is None
    assert old(rollout).places == rollout.places


@pytest.mark.parametrize("places", [[0], [0, 99], [1, 1], [-1, 3], [True, 3], "13", {"a": 1}, 5, [1.0, 3]])
async def test_a_file_with_wrong_places_is_refused(places: Any, tmp_path: Path) -> None:
    rollout = await play(SimulatedUser(turns=["sure?"]), Policy(lambda p: "7"))
    path = tmp_path / "step-000001.jsonl"
    path.write_text(json.dumps({**to_json(rollout), "call_messages": places}) + "\n")
    with pytest.raises(DataError, match="is not a saved rollout"):
        list(read_rollouts(path))


def test_a_conversation_written_by_hand_has_its_answers_after_the_last_user() -> None:
    turns = ({"role": "assistant", "content": "a", "tool_calls": []}, {"role": "tool", "content": "t"})
    by_hand = Rollout(
        rollout_id=0, group_id=0, calls=(), messages=(*EXAMPLES, ASKED, *turns, {"role": "assistant", "content": " 7 "})
    )
    assert (texts(by_hand), by_hand.answer, by_hand.num_prompt_messages) == (["a", " 7 "], "7", 7)
    assert replace(by_hand, status=RolloutStatus.FAILED).sampled_turns == ()


# Agents


async def run_agent(agent: Any, *turns: str) -> Rollout:
    sampler = Sampler(
        engine=ScriptedEngine(says(TOKENIZER, *(f"{turn}<|im_end|>" for turn in turns))),
        chat=CHAT,
        make_environment=partial(make_environment, "agent", agent=agent),
        max_turns=8,
        seed=5,
    )
    (rollout,) = await sampler.collect([{"question": "q"}], samples_per_prompt=1, sampling=sampling(), step=0)
    assert rollout.error is None
    return rollout


def agent(*, start: Any = (), strips: bool = False, critic: Any = (), branch: bool = False) -> Any:
    """Return an agent that talks for two turns after `start`, and may ask another conversation at the end."""

    async def run(base_url: str, api_key: str, example: Mapping[str, Any]) -> None:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:

            async def ask(messages: Any) -> dict[str, Any]:
                answer = await client.chat.completions.create(model="m", messages=messages)
                said = answer.choices[0].message.model_dump(exclude_none=True)
                return {"role": "assistant", "content": said["content"].strip()} if strips else said

            messages: list[Any] = [*start, {"role": "user", "content": "go"}]
            messages.append(await ask(messages))
            messages.append({"role": "user", "content": "go on"})
            messages.append(await ask(messages))
            if branch:
                await ask([*messages[:-2], {"role": "user", "content": "or so"}])
            if critic:
                await ask(list(critic))

    return run


HISTORY = [{"role": "assistant", "content": "Welcome."}, {"role": "user", "content": "x"}, *EXAMPLES]


@pytest.mark.parametrize("start", [[], EXAMPLES, HISTORY], ids=["plain", "examples", "the assistant begins"])
@pytest.mark.parametrize("strips", [False, True], ids=["sends turns back", "strips reasoning and space"])
@pytest.mark.parametrize("said", ["fine", "It is 4.", "<think>\nhm\n</think>\n\nfine "])
async def test_an_agents_turns_are_told_from_the_history_it_began_with(start: Any, strips: bool, said: str) -> None:
    rollout = await run_agent(agent(start=start, strips=strips), said, f"{said}!")
    first = len(start) + 1
    assert rollout.places == (first, first + 2)
    assert [text.strip() for text in texts(rollout)] == [
        said.split("\n")[-1].strip(),
        f"{said}!".split("\n")[-1].strip(),
    ]


async def test_equal_answers_of_an_agent_have_places_of_their_own() -> None:
    rollout = await run_agent(agent(start=EXAMPLES, strips=True), "<think>\nhm\n</think>\n\nIt is 4.")
    assert rollout.places == (7, 9)


async def test_the_last_conversation_of_an_agent_counts() -> None:
    branched = await run_agent(agent(branch=True), "one", "two", "three")
    assert (branched.places, texts(branched)) == ((1, None, 3), ["one", "three"])
    judged = await run_agent(agent(critic=[*EXAMPLES, ASKED]), "one", "two", "three")
    assert (judged.places, texts(judged)) == ((None, None, 7), ["three"])
    assert judged.num_prompt_messages == 7
