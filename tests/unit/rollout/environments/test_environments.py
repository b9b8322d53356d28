"""Environments turn rows into messages and assistant turns into what comes next."""

from __future__ import annotations

import json
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.environments import ENVIRONMENTS, make_environment
from rollout.environments.calculator import MAX_EXPRESSION_CHARS, calculator, evaluate
from rollout.environments.mixed import Mixed
from rollout.environments.prompt import Prompt
from rollout.environments.tools import ToolEnvironment
from rollout.environments.user import SimulatedUser
from rollout.episode.environment import RunsItself
from rollout.errors import ConfigError, DataError


def say(content: str) -> dict:
    return {"role": "assistant", "content": content}


def use(name: str, **arguments: object) -> dict:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


# --- prompts


def test_a_text_column_becomes_a_user_turn():
    assert Prompt().messages({"question": "why?"}) == ({"role": "user", "content": "why?"},)


def test_messages_win_over_prompt_and_prompt_over_question():
    row = {"question": "q", "prompt": "p", "messages": [{"role": "user", "content": "m"}]}
    assert Prompt().messages(row)[0]["content"] == "m"
    assert Prompt().messages({**row, "messages": None})[0]["content"] == "p"
    assert Prompt(column="question").messages(row)[0]["content"] == "q"


def test_a_system_prompt_is_added_only_where_the_row_has_none():
    prompt = Prompt(system="be brief")
    assert [turn["role"] for turn in prompt.messages({"question": "q"})] == ["system", "user"]
    row = {"messages": [{"role": "system", "content": "be long"}, {"role": "user", "content": "q"}]}
    assert [turn["content"] for turn in prompt.messages(row)] == ["be long", "q"]


def test_empty_keys_that_columnar_files_add_are_left_out():
    row = {"messages": [{"role": "user", "content": "q", "tool_calls": None, "name": None}]}
    assert Prompt().messages(row) == ({"role": "user", "content": "q"},)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"text": "q"}, "found text"),
        ({"messages": []}, "list of messages"),
        ({"prompt": 7}, "list of messages"),
        ({"messages": [{"from": "human", "value": "q"}]}, "role and content"),
        ({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}, "assistant turn"),
    ],
)
def test_a_row_without_a_prompt_to_answer_is_refused_with_the_reason(row, says):
    with pytest.raises(DataError, match=says):
        Prompt().messages(row)


# --- by name


NEEDED = {
    "mixed": {"environments": {"calculator": {}}},
    "agent": {"agent": print},
    "trl": {"factory": dict},
    "trl_rollout": {"rollout_func": print},
}


def test_every_environment_can_be_made_by_its_name():
    for name in ENVIRONMENTS:
        if name == "verifiers":  # needs its package
            continue
        environment = make_environment(name, **NEEDED.get(name, {}))
        assert isinstance(environment, RunsItself) or environment.tools is not None


def test_an_unknown_name_or_setting_is_a_config_error():
    with pytest.raises(ConfigError, match=r"expected one of .*calculator"):
        make_environment("calculater")
    with pytest.raises(ConfigError, match="turns_per_day"):
        make_environment("calculator", turns_per_day=3)
    with pytest.raises(ConfigError, match="tool_timeout"):
        make_environment("mixed", environments={"calculator": {"tool_timeout": 3}})


# --- tools


async def test_calculator_episode_calls_the_tool_and_ends_with_the_answer():
    environment = make_environment("calculator")
    opening = await environment.reset({"question": "compute 64*22-55", "answer": "1353"})
    assert opening == ({"role": "user", "content": "compute 64*22-55"},)
    assert [tool["function"]["name"] for tool in environment.tools] == ["calculator"]
    step = await environment.step(use("calculator", expression="64*22-55"))
    assert not step.done
    assert [turn["content"] for turn in step.messages] == ["1353"]
    assert step.outcome == {"tool_calls": 1, "tool_errors": 0}
    last = await environment.step(say("The answer is 1353"))
    assert last.done
    assert last.messages == ()


async def test_the_slow_calculator_is_the_calculator_but_for_the_time_it_takes():
    slow = make_environment("slow_calculator", max_delay_s=0.2, delay_seed=7)
    assert slow.tools == make_environment("calculator").tools
    durations = []
    for _ in range(3):
        started = time.perf_counter()
        step = await slow.step(use("calculator", expression="64*22-55"))
        durations.append(time.perf_counter() - started)
        assert [turn["content"] for turn in step.messages] == ["1353"]
    chance = random.Random(7)
    for duration in durations:
        assert duration >= chance.uniform(0, 0.2) - 1e-3


async def test_a_model_that_calls_wrongly_is_told_and_goes_on():
    environment = make_environment("calculator")
    await environment.reset({"question": "q"})
    for turn, says in (
        (use("calculator", expression="2**9"), "only integers"),
        (use("calculator", expression=5), "not of type 'string'"),
        (use("python", code="1"), "no tool 'python'"),
        ({**say("<tool_call>{"), "tool_call_errors": ["never closed"]}, "never closed"),
    ):
        step = await environment.step(turn)
        assert not step.done
        assert says in step.messages[0]["content"]
        assert step.outcome["tool_errors"] == 1


async def test_own_tools_come_from_functions_and_files(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text('def now() -> str:\n    """The time."""\n    return "noon"\n')
    environment = ToolEnvironment([calculator], files=[f"{file}:now"])
    assert [tool["function"]["name"] for tool in environment.tools] == ["calculator", "now"]
    await environment.reset({"question": "q"})
    assert (await environment.step(use("now"))).messages[0]["content"] == "noon"


async def test_chain_looks_up_the_links_of_its_own_row():
    row = {"question": "find c42", "links": [{"key": "c42", "value": "go e17"}, {"key": "e17", "value": "value 731"}]}
    first, second = make_environment("chain"), make_environment("chain")
    await first.reset(row)
    await second.reset({"question": "find c42", "links": [{"key": "c42", "value": "value 1"}]})
    assert (await first.step(use("lookup", key="c42"))).messages[0]["content"] == "go e17"
    assert (await second.step(use("lookup", key="c42"))).messages[0]["content"] == "value 1"
    missing = await first.step(use("lookup", key="zz"))
    assert "nothing is known about zz" in missing.messages[0]["content"]
    assert missing.outcome["tool_errors"] == 1
    with pytest.raises(DataError, match="links"):
        await make_environment("chain").reset({"question": "find c42"})


async def test_single_turn_ends_at_once():
    environment = make_environment("single_turn", system_prompt="be brief")
    assert len(await environment.reset({"prompt": "q"})) == 2
    assert (await environment.step(say("a"))).done


# --- simulated user


async def test_a_scripted_user_says_its_turns_and_then_ends():
    environment = SimulatedUser(turns=["and then?", "thanks"])
    await environment.reset({"question": "q"})
    said = []
    while not (step := await environment.step(say("a"))).done:
        said += [turn["content"] for turn in step.messages]
        assert step.outcome == {"user_turns": 1}
    assert said == ["and then?", "thanks"]


async def test_the_rows_script_wins_over_the_settings():
    environment = SimulatedUser(turns=["from settings"])
    await environment.reset({"question": "q", "user_turns": ["from the row"]})
    assert (await environment.step(say("a"))).messages[0]["content"] == "from the row"
    with pytest.raises(DataError, match="list of texts"):
        await environment.reset({"question": "q", "user_turns": "one text"})


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_user_function_reads_the_conversation(is_async):
    def reply(conversation):
        return f"turn {len(conversation)}" if len(conversation) < 4 else None

    async def reply_async(conversation):
        return reply(conversation)

    environment = SimulatedUser(reply_async if is_async else reply)
    await environment.reset({"question": "q"})
    assert (await environment.step(say("a"))).messages == ({"role": "user", "content": "turn 2"},)
    assert (await environment.step(say("b"))).done


# --- mixed


async def test_mixed_becomes_the_environment_that_the_row_names():
    environment = Mixed({"calculator": {}, "single_turn": {}}, default="single_turn", system_prompt="be brief")
    assert environment.tools == ()
    opening = await environment.reset({"question": "q", "environment": "calculator"})
    assert [turn["role"] for turn in opening] == ["system", "user"]
    assert [tool["function"]["name"] for tool in environment.tools] == ["calculator"]
    assert not (await environment.step(use("calculator", expression="1+1"))).done
    await environment.reset({"question": "q"})
    assert environment.tools == ()
    assert (await environment.step(say("a"))).done


async def test_mixed_refuses_a_row_that_names_nothing_it_knows():
    with pytest.raises(DataError, match="'chess'"):
        await Mixed({"calculator": {}}).reset({"question": "q", "environment": "chess"})
    with pytest.raises(DataError, match="None"):
        await Mixed({"calculator": {}}).reset({"question": "q"})
    with pytest.raises(ConfigError, match="default"):
        Mixed({"calculator": {}}, default="chess")


# --- the calculator


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="0123456789+-*() ", max_size=60) | st.text(max_size=30))
def test_the_calculator_agrees_with_python_or_refuses(expression):
    try:
        value = evaluate(expression)
    except ValueError:
        return
    assert value == eval(expression.strip())
    assert type(value) is int


numbers = st.integers(min_value=0, max_value=10**6).map(str)
expressions = st.recursive(
    numbers,
    lambda inner: (
        st.tuples(inner, st.sampled_from("+-*"), inner).map("".join)
        | inner.map(lambda text: f"({text})")
        | inner.map(lambda text: f"-{text}")
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(expressions)
def test_the_calculator_evaluates_every_valid_expression(expression):
    if len(expression) <= MAX_EXPRESSION_CHARS:
        assert evaluate(expression) == eval(expression)


@pytest.mark.parametrize(
    "expression",
    ["", " ", "2**9", "7/2", "7//2", "__import__('os')", "1.5", "1e9", "(" * 150, "1" * 201, "1,2", "()", "1 2", "x",
     "0x10", "-" * 199 + "1" + "+", "1\x00"],
)  # fmt: skip
def test_the_calculator_refuses_all_else(expression):
    with pytest.raises(ValueError, match=r"only|not an expression|characters"):
        evaluate(expression)


def test_the_largest_expression_stays_small_and_quick():
    assert evaluate("9" * 99 + "*" + "9" * 100) == int("9" * 99) * int("9" * 100)
    assert evaluate("-" * 198 + "1") == 1
