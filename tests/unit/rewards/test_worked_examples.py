"""Rewards of prompts with worked examples: they grade what was sampled, and judges read the examples as such."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from lockstep.rewards.functions.judges.judge_server import answer_texts
from lockstep.rewards.functions.judges.scored import LlmJudge
from lockstep.rewards.model.reward import messages_up_to
from lockstep.rewards.resolve import resolve
from lockstep.rewards.trl import from_trl
from lockstep.rollout.episode.demonstration import demonstrated_calls
from lockstep.rollout.records import Rollout
from tests.fixtures.policies import CHAT
from tests.unit.rollout.test_sampled import ASKED, CALLED, EXAMPLES, SYSTEM

RIGHT = {"role": "assistant", "content": "<think>\nadd\n</think>\n\n7"}
WRONG = {"role": "assistant", "content": "8 8 8 8 8 8"}
CALL = {"id": "1", "type": "function", "function": {"name": "calculator", "arguments": '{"expression": "3+4"}'}}


def rollout(*turns: Mapping[str, Any], answer: Any = "7", number: int = 0) -> Rollout:
    """A rollout whose prompt has two worked examples, one with a tool."""
    messages = (SYSTEM, *EXAMPLES, ASKED, *turns)
    calls = tuple(demonstrated_calls(CHAT, messages))[-sum(turn["role"] == "assistant" for turn in turns) :]
    return Rollout(
        rollout_id=number, group_id=0, calls=calls, messages=messages, example={"answer": answer, "messages": []}
    )


def reward(name: str, given: Rollout, **settings: Any) -> float:
    (value,) = resolve(name, settings).calling([given])()
    return value


CALLS = [{"name": "calculator", "arguments": {"expression": "3+4"}}]


@pytest.mark.parametrize(
    ("name", "right", "wrong", "settings"),
    [
        ("exact_match", rollout({"role": "assistant", "content": "7"}), rollout(WRONG), {}),
        ("numeric", rollout(RIGHT), rollout(WRONG), {}),
        ("contains", rollout(RIGHT), rollout(WRONG), {}),
        ("think_format", rollout(RIGHT), rollout(WRONG), {}),
        ("repetition", rollout(RIGHT), rollout(WRONG), {"ngram": 2}),
        (
            "tool_calls_match",
            rollout({"role": "assistant", "content": "", "tool_calls": [CALL]}, answer=CALLS),
            rollout({"role": "assistant", "content": "", "tool_calls": [CALLED]}, answer=CALLS),
            {},
        ),
        (
            "tool_calls_match",
            rollout({"role": "assistant", "content": ""}, answer=[]),
            rollout({"role": "assistant", "content": "", "tool_calls": [CALLED]}, answer=[]),
            {},
        ),
    ],
)
def test_the_right_answer_earns_more_than_the_wrong_one(
    name: str, right: Rollout, wrong: Rollout, settings: dict[str, Any]
) -> None:
    assert reward(name, right, **settings) > reward(name, wrong, **settings)
    assert reward(name, right, **settings) in (0.0, 1.0)


def test_trl_functions_get_the_examples_in_the_prompt() -> None:
    given = [rollout(RIGHT), rollout({"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT, WRONG)]
    seen = from_trl(lambda prompts, completions: None).arguments(given)
    assert [[turn["role"] for turn in prompt] for prompt in seen["prompts"]] == [
        [turn["role"] for turn in (SYSTEM, *EXAMPLES, ASKED)]
    ] * 2
    assert [[turn["role"] for turn in one] for one in seen["completions"]] == [
        ["assistant"],
        ["assistant", "tool", "assistant"],
    ]


RESULT = {"role": "tool", "tool_call_id": "1", "name": "calculator", "content": "7"}


def test_the_conversation_of_a_turn_is_that_of_its_call() -> None:
    given = rollout({"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT, WRONG)
    assert messages_up_to(given, 0) == given.messages[:9]
    assert messages_up_to(given, 1) == given.messages


def test_a_judge_reads_examples_with_their_answers_and_apart_from_the_question() -> None:
    texts = LlmJudge(url="u", model="m").texts_of(rollout(RIGHT), answer_texts(rollout(RIGHT)))
    assert list(texts) == ["Earlier turns", "Question", "Answer"]
    assert texts["Earlier turns"] == (
        "User: 1+1?\nAssistant: It is 2.\nUser: 2+2?\n"
        'Assistant: calculator({"expression": "2+2"})\nTool: 4\nAssistant: It is 4.'
    )
    assert (texts["Question"], texts["Answer"]) == ("3+4?", RIGHT["content"])


def test_a_judge_reads_the_turns_of_a_user_who_answered() -> None:
    sure = {"role": "user", "content": "sure?"}
    texts = LlmJudge(url="u", model="m").texts_of(
        rollout(WRONG, sure, RIGHT), answer_texts(rollout(WRONG, sure, RIGHT))
    )
    assert texts["Question"] == "3+4?"
    assert texts["Turns before Answer"] == f"Assistant: {WRONG['content']}\nUser: sure?"
    tools = answer_texts(rollout({"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT, RIGHT))
    assert list(tools) == ["Answer"], "only a user's turns are part of what was asked"


def test_the_texts_of_a_plain_prompt_are_question_and_answer() -> None:
    plain = Rollout(rollout_id=0, group_id=0, calls=(), messages=(SYSTEM, ASKED, RIGHT), example={"answer": 7})
    judge = LlmJudge(url="u", model="m", column="answer")
    assert judge.texts_of(plain, answer_texts(plain)) == {
        "Question": "3+4?",
        "Reference": "7",
        "Answer": RIGHT["content"],
    }
