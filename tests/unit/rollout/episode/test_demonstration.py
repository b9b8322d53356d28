"""Demonstrations have the ids and the loss mask of rollouts with the same turns."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.environments.demo.calculator import CalculatorEnvironment
from lockstep.rollout.episode.demonstration import demonstrated_calls
from lockstep.rollout.episode.environment import Step
from lockstep.rollout.episode.episode import run_episode
from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.errors import ConfigError, TemplateError
from lockstep.rollout.records import Message, Rollout, TrainingRow
from tests.fixtures.conversations import USER, WEATHER
from tests.fixtures.gateway import ScriptedEngine
from tests.fixtures.policies import Policy, play, tool_call
from tests.fixtures.tokenizers import chat_tokenizer

FAMILIES = {"chatml": "<|im_end|>", "qwen3": "<|im_end|>", "llama3": "<|eot_id|>"}


def rows_of(chat: Chat, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[TrainingRow]:
    return rows_from_calls(demonstrated_calls(chat, messages, tools))


def assert_same_rows(found: Sequence[TrainingRow], expected: Sequence[TrainingRow]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.ids, other.ids)
        np.testing.assert_array_equal(one.loss_mask, other.loss_mask)
        np.testing.assert_array_equal(one.turns, other.turns)


class Users:
    """Environment whose user says one line after another."""

    tools = ()

    def __init__(self, *lines: str) -> None:
        self._lines = list(lines)

    async def reset(self, example: Mapping[str, Any]) -> Sequence[Message]:
        return [{"role": "system", "content": "be brief"}, {"role": "user", "content": self._lines.pop(0)}]

    async def step(self, message: Message) -> Step:
        if not self._lines:
            return Step(done=True)
        return Step(messages=({"role": "user", "content": self._lines.pop(0)},))


def sampled(chat: Chat, turns: Sequence[str], *, end: str) -> Rollout:
    """Play these turns, as an engine samples them, against as many lines of a user."""
    left = [chat.tokenizer.encode(turn + end, add_special_tokens=False) for turn in turns]
    users = Users(*(f"question {number}, <|im_end|>?" for number in range(len(turns))))
    return asyncio.run(
        run_episode(
            engine=ScriptedEngine(lambda *_: left.pop(0)),
            chat=chat,
            environment=users,  # type: ignore[arg-type]
            example={},
            sampling=Sampling(max_tokens=256, stop_token_ids=chat.stop_token_ids),
            max_turns=len(turns),
            rollout_id=0,
            group_id=0,
            seed=0,
        )
    )


@pytest.mark.parametrize("history", ["keep", "template"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_those_of_a_rollout_with_the_same_turns(family: str, history: str) -> None:
    chat = Chat(chat_tokenizer(family), history=history)
    turns = ["the user asks", "Skinny ski", "the assistant answers; tools"]
    if family == "qwen3":  # it shows the reasoning of the last turn only, where history=template branches
        turns = [f"<think>\nfirst {turn}\n</think>\n\n{turn}" for turn in turns]
    rollout = sampled(chat, turns, end=FAMILIES[family])
    assert rollout.num_turns == 3
    expected = rows_from_calls(rollout.calls)
    assert len(expected) == (3 if (family, history) == ("qwen3", "template") else 1)
    found = rows_of(chat, rollout.messages)
    assert_same_rows(found, expected)
    end_id = chat.tokenizer.convert_tokens_to_ids(FAMILIES[family])
    assert sum(int((row.ids[row.loss_mask] == end_id).sum()) for row in found) == 3, "every turn ends with its token"


def test_rows_with_tool_calls_and_results_are_those_of_the_rollout() -> None:
    def answer(prompt: str) -> str:
        results = re.findall(r"<tool_response>\n(.*)\n", prompt)
        thought = "<think>\n\n</think>\n\n"
        return (
            f"{thought}The answer is {results[-1]}" if results else thought + tool_call("calculator", expression="6*7")
        )

    environment = CalculatorEnvironment()
    rollout = asyncio.run(play(environment, Policy(answer), example={"question": "compute 6*7", "answer": "42"}))
    assert rollout.num_turns == 2
    chat = Chat(chat_tokenizer("qwen3"))
    expected = rows_from_calls(rollout.calls)
    assert_same_rows(rows_of(chat, rollout.messages, environment.tools), expected)


def test_a_turn_of_weight_0_is_context() -> None:
    chat = Chat(chat_tokenizer("chatml"))
    messages = [
        USER,
        {"role": "assistant", "content": "wrong", "weight": 0},
        USER,
        {"role": "assistant", "content": "r"},
    ]
    (row,) = rows_of(chat, messages)
    (whole,) = rows_of(chat, [{k: v for k, v in message.items() if k != "weight"} for message in messages])
    np.testing.assert_array_equal(row.ids, whole.ids)
    assert not (row.loss_mask & (whole.turns == 0)).any()
    assert (row.loss_mask == (whole.turns == 1)).all()


REFUSED: dict[str, tuple[str, list[dict[str, Any]], str]] = {
    "nothing to train": ("chatml", [USER], "no assistant turn"),
    "no prompt": ("chatml", [{"role": "assistant", "content": "x"}], "message 0 is an assistant turn"),
    "a weight": ("chatml", [USER, {"role": "assistant", "content": "x", "weight": 0.5}], "weight 0.5; expected 0"),
    "hidden reasoning": (
        "chatml",
        [USER, {"role": "assistant", "content": "x", "reasoning_content": "because"}],
        "message 1: the chat template does not show its reasoning_content",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_messages_that_no_rollout_has_are_refused(case: str) -> None:
    family, messages, sentence = REFUSED[case]
    with pytest.raises(TemplateError, match=sentence):
        demonstrated_calls(Chat(chat_tokenizer(family)), messages)


TURN = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}"
LOOP = "{% for m in messages %}" + TURN + "{% endfor %}"


def test_a_template_that_opens_a_turn_otherwise_than_it_renders_it_is_refused() -> None:
    opens = LOOP + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
    chat = Chat(chat_tokenizer("qwen3", template=opens))
    with pytest.raises(TemplateError, match="renders this turn in another way than it opens one"):
        demonstrated_calls(chat, [USER, {"role": "assistant", "content": "x"}])
    thought = {"role": "assistant", "content": "<think>\nwell\n</think>\n\nx"}
    (row,) = rows_of(chat, [USER, thought])
    assert chat.decode(row.ids[row.loss_mask].tolist()) == "well\n</think>\n\nx<|im_end|>"


def test_a_template_that_ends_a_turn_with_text_is_refused() -> None:
    plain = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    plain += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    with pytest.raises(TemplateError, match="ends this turn with no token at which sampling stops"):
        demonstrated_calls(
            Chat(chat_tokenizer("chatml", template=plain)), [USER, {"role": "assistant", "content": "x"}]
        )


def test_tools_that_the_template_drops_are_refused() -> None:
    chat = Chat(
        chat_tokenizer("chatml", template=LOOP + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    )
    with pytest.raises(ConfigError, match="drops the tools"):
        demonstrated_calls(chat, [USER, {"role": "assistant", "content": "x"}], [WEATHER])


def test_control_tokens_that_a_demonstration_spells_out_stay_text() -> None:
    chat = Chat(chat_tokenizer("chatml"))
    (row,) = rows_of(chat, [USER, {"role": "assistant", "content": "say <|im_end|> twice"}])
    end_id = chat.tokenizer.convert_tokens_to_ids("<|im_end|>")
    trained = row.ids[row.loss_mask]
    assert (trained == end_id).sum() == 1
    assert chat.decode(trained.tolist()) == "say <|im_end|> twice<|im_end|>"
