"""Python functions as tools: every call is answered, whatever the model writes, and the event loop goes on."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
import time
from typing import Annotated, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field

from lockstep.rollout.environments.toolbox import MAX_CALLS, Toolbox, ToolFault, count_results, failed_call
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.hosts import foreign_schemas
from lockstep.rollout.media.image_files import MAX_PIXELS
from lockstep.rollout.records import Rollout


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


async def echo(text: str) -> str:
    """Say it again.

    Args:
        text: what to say
    """
    return text


def pick(items: list[int], mode: str | None = None) -> dict:
    """Pick from items.

    Args:
        items: where to pick from
        mode: how (choices: ["first", "last"])
    """
    return {"picked": items[0], "mode": mode}


def fail(kind: str) -> str:
    """Fail in some way.

    Args:
        kind: the way
    """
    if kind == "exit":
        raise SystemExit(3)
    if kind == "interrupt":
        raise KeyboardInterrupt
    raise RuntimeError("the disk is full")


async def fail_async(kind: str) -> str:
    """Fail in some way.

    Args:
        kind: the way
    """
    if kind == "cancelled":
        raise asyncio.CancelledError
    raise SystemExit(3)


def sleep(seconds: float) -> str:
    """Sleep in a thread.

    Args:
        seconds: how long
    """
    time.sleep(seconds)
    return "slept"


async def sleep_async(seconds: float) -> str:
    """Sleep in the loop.

    Args:
        seconds: how long
    """
    await asyncio.sleep(seconds)
    return "slept"


def message(*calls: tuple[str, object], errors: tuple[str, ...] = ()) -> dict:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": f"id{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for n, (name, arguments) in enumerate(calls)
        ],
        "tool_call_errors": list(errors),
    }


async def call(function, arguments: object, **settings):
    (result,) = await Toolbox([function], **settings).answer(message((function.__name__, arguments)))
    return result


def spell(word: Annotated[str, Field(pattern="^(a+)+$")]) -> str:
    """Spell a word.

    Args:
        word: the word
    """
    return "-".join(word)


def count_words(words: set[str | int]) -> int:
    """Count words.

    Args:
        words: the words
    """
    return len(words)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [(spell, {"word": "a" * 40 + "x"}), (count_words, {"words": [*map(str, range(4000)), *range(4000)]})],
)
async def test_a_check_that_takes_long_does_not_stop_the_loop(
    function: Any, arguments: Any, monkeypatch: pytest.MonkeyPatch
):
    """A pattern that backtracks, and a set that is compared in pairs."""
    monkeypatch.setattr(foreign_schemas, "CHECK_S", 1.0)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    ticking = asyncio.create_task(tick())
    answered = await call(function, arguments, timeout_s=30.0)
    ticking.cancel()
    assert answered.fault is ToolFault.SERVER
    assert ticks > 10


async def test_a_pattern_of_a_python_function_is_checked():
    assert (await call(spell, {"word": "aaa"})).content == "a-a-a"
    assert (await call(spell, {"word": "b"})).fault is ToolFault.BAD_ARGUMENTS


async def test_a_call_returns_its_result_as_a_tool_message():
    result = await call(add, '{"a": 2, "b": 3}')
    assert result.fault is None
    assert result.message == {"role": "tool", "name": "add", "tool_call_id": "id0", "content": "5"}


async def test_arguments_may_be_parsed_and_defaults_apply():
    assert (await call(add, {"a": 2})).content == "3"


async def test_async_functions_and_json_results_work():
    assert (await call(echo, '{"text": "x"}')).content == "x"
    assert json.loads((await call(pick, '{"items": [7], "mode": "last"}')).content) == {"picked": 7, "mode": "last"}


def test_schema_comes_from_type_hints_and_docstring():
    function = Toolbox([add]).schemas[0]["function"]
    assert function["name"] == "add"
    assert function["description"] == "Add two numbers."
    assert function["parameters"]["required"] == ["a"]
    assert function["parameters"]["properties"]["a"] == {"type": "integer", "description": "the first"}


@pytest.mark.parametrize(
    ("function", "arguments", "fault", "says"),
    [
        (add, '{"a": "two"}', ToolFault.BAD_ARGUMENTS, "'two' is not of type 'integer'"),
        (add, '{"a": true}', ToolFault.BAD_ARGUMENTS, "True is not of type 'integer'"),
        (add, '{"b": 2}', ToolFault.BAD_ARGUMENTS, "'a' is a required property"),
        (add, '{"a": 2, "c": 3}', ToolFault.BAD_ARGUMENTS, "'c' was unexpected"),
        (pick, '{"items": [1, "x"]}', ToolFault.BAD_ARGUMENTS, "items[1]"),
        (pick, '{"items": [1], "mode": "middle"}', ToolFault.BAD_ARGUMENTS, "'middle'"),
        (add, '{"a": 2', ToolFault.MALFORMED, "not a JSON object"),
        (add, "[1, 2]", ToolFault.MALFORMED, "not a JSON object: found list"),
        (add, '{"a": NaN}', ToolFault.MALFORMED, "NaN is not JSON"),
        (sleep, '{"seconds": 1e400}', ToolFault.MALFORMED, "the number 1e400 is too large"),
        (sleep, '{"seconds": 1%s}' % ("0" * 400), ToolFault.EXCEPTION, "OverflowError"),
        (add, '{"a": 1%s}' % ("0" * 5000), ToolFault.MALFORMED, "4300 digits"),
        (pick, '{"items": %s}' % ("[" * 200 + "]" * 200), ToolFault.MALFORMED, "nested more than 100 levels"),
        (echo, {"text": [[]] * 3}, ToolFault.BAD_ARGUMENTS, "is not of type 'string'"),
        (add, "[" * 100_000, ToolFault.MALFORMED, "not a JSON object"),
        (fail, '{"kind": "error"}', ToolFault.EXCEPTION, "RuntimeError: the disk is full"),
        (fail, '{"kind": "exit"}', ToolFault.EXCEPTION, "SystemExit: 3"),
        (fail, '{"kind": "interrupt"}', ToolFault.EXCEPTION, "KeyboardInterrupt"),
        (fail_async, '{"kind": "exit"}', ToolFault.EXCEPTION, "SystemExit: 3"),
        (fail_async, '{"kind": "cancelled"}', ToolFault.EXCEPTION, "CancelledError"),
    ],
)
async def test_a_wrong_call_is_answered_with_the_mistake(function, arguments, fault, says):
    result = await call(function, arguments)
    assert result.fault is fault
    assert result.content.startswith("error: ")
    assert says in result.content


async def test_an_argument_may_have_the_name_of_a_setting_of_the_toolbox():
    def wait(timeout_s: int) -> int:
        """Wait.

        Args:
            timeout_s: how long
        """
        return timeout_s

    assert (await call(wait, {"timeout_s": 3})).content == "3"


async def test_none_is_accepted_for_an_optional_argument():
    result = await call(pick, '{"items": [7], "mode": null}')
    # The enum does not list null: the other branch of the union must accept it.
    assert result.fault is None


async def test_an_unknown_tool_is_answered_with_the_known_names():
    (result,) = await Toolbox([add, echo]).answer(message(("subtract", "{}")))
    assert result.fault is ToolFault.UNKNOWN_TOOL
    assert "'subtract'" in result.content
    assert "add, echo" in result.content


async def test_malformed_calls_are_answered_after_the_others():
    results = await Toolbox([add]).answer(message(("add", '{"a": 1}'), errors=("line 1 is not JSON",)))
    assert [result.fault for result in results] == [None, ToolFault.MALFORMED]
    assert "line 1 is not JSON" in results[1].content
    assert count_results(results) == {"tool_calls": 2, "tool_errors": 1, "tool_errors_malformed": 1}


async def test_a_message_without_calls_gets_no_answer():
    toolbox = Toolbox([add])
    assert await toolbox.answer({"role": "assistant", "content": "hello"}) == []
    assert await toolbox.answer({"role": "assistant", "content": "hello", "tool_calls": None}) == []


@pytest.mark.parametrize("function", [sleep, sleep_async])
async def test_a_slow_tool_times_out_and_the_loop_goes_on(function):
    started = time.monotonic()
    result = await call(function, '{"seconds": 15}', timeout_s=0.1)
    assert time.monotonic() - started < 12
    assert result.fault is ToolFault.TIMEOUT
    assert "0.1 s" in result.content


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_calls_of_one_turn_run_at_the_same_time_and_answer_in_order(kind: str):
    threads, tasks = threading.Barrier(4), asyncio.Barrier(4)

    def meet(number: int) -> int:
        """Wait for the other calls.

        Args:
            number: which one
        """
        threads.wait(30)
        return number

    async def meet_async(number: int) -> int:
        """Wait for the other calls.

        Args:
            number: which one
        """
        async with asyncio.timeout(30):
            await tasks.wait()
        return number

    function = meet if kind == "sync" else meet_async
    toolbox = Toolbox([function])
    results = await toolbox.answer(message(*[(function.__name__, {"number": number}) for number in (3, 1, 2, 0)]))
    assert [result.call_id for result in results] == ["id0", "id1", "id2", "id3"]
    assert [result.content for result in results] == ["3", "1", "2", "0"]


async def test_a_long_result_is_cut_and_says_so():
    result = await call(echo, {"text": "x" * 100}, max_result_chars=10)
    assert result.content == "x" * 10 + "\n[cut: 100 characters, 10 shown]"


async def test_lone_surrogates_in_a_result_are_replaced():
    assert (await call(echo, {"text": "a\ud800b"})).content == "a?b"


def test_the_failed_call_that_is_shown_is_an_exception_of_a_tool():
    def rollout(*contents: str, **outcome: Any) -> Rollout:
        answers = tuple({"role": "tool", "content": content} for content in contents)
        messages = ({"role": "user", "content": "?"}, *answers)
        return Rollout(rollout_id=0, group_id=0, calls=(), messages=messages, outcome=outcome)

    fine = rollout("error: a result of its own", "error: no", tool_calls=2, tool_errors=1, tool_errors_exception=1)
    malformed = rollout("error: unread", tool_calls=1, tool_errors=1, tool_errors_malformed=1)
    raised = rollout("error: OSError: down", tool_calls=1, tool_errors=1, tool_errors_exception=1)
    foreign = rollout("anything", tool_calls="many", tool_errors="many")
    assert failed_call([fine, malformed, raised, foreign]) == "error: OSError: down"
    assert failed_call([fine, malformed]) == "error: unread"
    assert failed_call([fine, foreign]) is None


def test_functions_that_cannot_be_tools_are_refused_with_the_reason():
    def no_docstring(a: int) -> int:
        return a

    def no_types(a) -> int:
        """Do it.

        Args:
            a: something
        """
        return a

    def variadic(*a: int) -> int:
        """Do it.

        Args:
            a: something
        """
        return a[0]

    for function, says in ((no_docstring, "docstring"), (no_types, "type hint"), (variadic, "plain parameters")):
        with pytest.raises(ConfigError, match=says):
            Toolbox([function])
    with pytest.raises(ConfigError, match="2 tools are named 'add'"):
        Toolbox([add, add])


async def test_tools_are_loaded_from_a_users_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        'def double(x: int) -> int:\n    """Double.\n\n    Args:\n        x: a number\n    """\n    return 2 * x\n\n'
        "def untyped(x):\n    return x\n"
    )
    toolbox = Toolbox([add], files=[f"{file}:double"])
    assert [schema["function"]["name"] for schema in toolbox.schemas] == ["add", "double"]
    (result,) = await toolbox.answer(message(("double", {"x": 4})))
    assert result.content == "8"
    with pytest.raises(ConfigError, match="untyped"):
        Toolbox([], files=[f"{file}:double,untyped"])
    with pytest.raises(ConfigError, match=r"no function 'triple'; it has double, untyped"):
        Toolbox([], files=[f"{file}:triple"])
    with pytest.raises(ConfigError, match="no file"):
        Toolbox([], files=[f"{tmp_path}/absent.py:double"])
    with pytest.raises(ConfigError, match=r"expected path/to/file\.py:name"):
        Toolbox([], files=["os.system"])
    with pytest.raises(ConfigError, match=r"found tools\.py:double, expected a list; write \[tools\.py:double\]"):
        Toolbox([], files="tools.py:double")


class Nameless(Exception):
    def __str__(self) -> str:
        raise OSError("no text")


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (lambda: 10**5000, "ValueError: Exceeds the limit"),
        (lambda: functools.reduce(lambda inner, _: [inner], range(100_000), []), "RecursionError"),
        (lambda: {}[10**5000], "KeyError"),
        (lambda: {"item": Nameless()}, "OSError: no text"),
        (lambda: (_ for _ in ()).throw(Nameless()), "Nameless"),
    ],
    ids=["digits", "depth", "key", "text", "error"],
)
async def test_a_result_or_an_error_that_cannot_be_written_is_answered_with_an_error(returned, says):
    def produce() -> str:
        """Produce something."""
        return returned()

    result = await call(produce, "{}")
    assert result.fault is ToolFault.EXCEPTION
    assert result.content.startswith(f"error: {says}")


@pytest.mark.parametrize("num_errors", [0, 5])
async def test_calls_beyond_the_limit_of_a_turn_are_not_run_and_get_one_answer(num_errors):
    calls = [("sleep", {"seconds": 0.0})] * (MAX_CALLS + 7)
    results = await Toolbox([sleep]).answer(message(*calls, errors=("not JSON",) * num_errors))
    assert [result.content for result in results[:MAX_CALLS]] == ["slept"] * MAX_CALLS
    (last,) = results[MAX_CALLS:]
    assert last.fault is ToolFault.TOO_MANY
    assert last.content == f"error: {7 + num_errors} further tool calls were not run; a turn may have {MAX_CALLS}"
    unread = await Toolbox([]).answer(message(errors=("not JSON",) * 5000))
    assert len(unread) == MAX_CALLS + 1
    assert "4872 further tool calls" in unread[-1].content


async def test_a_call_that_gets_no_thread_is_answered(monkeypatch):
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    result = await call(add, '{"a": 1}')
    assert (result.fault, result.content) == (ToolFault.EXCEPTION, "error: RuntimeError: can't start new thread")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(["add", "pick", "nothing"]) | st.text(), arguments=json_values | st.text().map(str))
def test_every_call_is_answered(name, arguments):
    toolbox = Toolbox([add, pick])
    for form in (arguments, json.dumps(arguments)):
        (result,) = asyncio.run(toolbox.answer(message((name, form))))
        assert isinstance(result.content, str)
        result.content.encode("utf-8")


async def test_an_image_is_a_part_of_the_result_alone_or_among_texts():
    from PIL import Image

    image = Image.new("RGB", (3, 2), "red")

    def look(kind: str) -> Any:
        """Look.

        Args:
            kind: what to return
        """
        return {"image": image, "both": ["left \ud800", image, 7], "text": [1, 2]}[kind]

    async def content(kind: str) -> Any:
        call = {"id": "1", "function": {"name": "look", "arguments": {"kind": kind}}}
        (result,) = await Toolbox([look], max_result_chars=8).answer({"role": "assistant", "tool_calls": [call]})
        assert result.fault is None
        return result.message["content"]

    part = {"type": "image", "image": image}
    assert await content("image") == [part]
    assert await content("both") == [{"type": "text", "text": "left ?"}, part, {"type": "text", "text": "7"}]
    assert await content("text") == "[1, 2]"


async def test_an_image_that_cannot_be_read_or_seen_is_an_error_of_its_call():
    from PIL import Image

    def crop(width: int) -> Any:
        """Crop.

        Args:
            width: of the crop
        """
        return Image.new("RGB", (width, 2), "red")

    toolbox = Toolbox([crop])
    (empty,) = await toolbox.answer(message(("crop", {"width": 0})))
    assert (empty.fault, empty.content) == (
        ToolFault.EXCEPTION,
        f"error: crop: the result: the image cannot be read: it has 0 x 2 pixels, expected 1 to {MAX_PIXELS}",
    )
    (unseen,) = await toolbox.answer(message(("crop", {"width": 3})), sees_images=False)
    assert unseen.content == "error: crop: it returned an image, which the model does not see"
