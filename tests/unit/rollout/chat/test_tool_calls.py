"""Parsing of sampled text: calls, reasoning, and sentences on malformed calls. Nothing raises."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.rollout.chat.harmony import parse_harmony
from lockstep.rollout.chat.tool_calls import (
    PYTHON_TAG,
    ToolCall,
    Turn,
    parse_hermes,
    parse_llama3,
    split_reasoning,
)
from lockstep.rollout.replies import MAX_DEPTH
from tests.fixtures.cost import cpu_s


def hermes(*bodies: str) -> str:
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def test_hermes_calls_are_read_in_order_and_leave_the_content() -> None:
    text = "First this.\n" + hermes('{"name": "a", "arguments": {"x": 1}}', '{"name": "b", "arguments": {}}')
    turn = parse_hermes(text)
    assert turn.calls == (ToolCall(name="a", arguments='{"x": 1}'), ToolCall(name="b", arguments="{}"))
    assert turn.content == "First this."
    assert turn.errors == ()


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ('{"name": "a", "arguments": {"x": }}', "not valid JSON"),
        ("", "not valid JSON"),
        ("[1]", "must be a JSON object with a name and arguments, found a list"),
        ("null", "found null"),
        ('{"arguments": {}}', "must have a name"),
        ('{"name": 3, "arguments": {}}', "must have a name"),
        ('{"name": "a", "arguments": [1]}', "call to 'a' must be a JSON object, found a list"),
        ('{"name": "a", "arguments": "{"}', "call to 'a' are not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"name": "a", "arguments": {"x": %s}}' % ("[" * 150 + "]" * 150), f"more than {MAX_DEPTH} levels"),
        ('{"name": "a", "arguments": {"x": %s}}' % ("9" * 5000), "not valid JSON"),
    ],
)
def test_a_malformed_call_is_explained_and_stays_in_the_content(body: str, error: str) -> None:
    turn = parse_hermes("Well. " + hermes(body))
    assert turn.calls == ()
    assert len(turn.errors) == 1
    assert error in turn.errors[0]
    assert turn.content == "Well. " + hermes(body)


def test_a_good_call_beside_a_malformed_one_is_kept() -> None:
    turn = parse_hermes(hermes('{"name": "a", "arguments": {}}', "oops"))
    assert [call.name for call in turn.calls] == ["a"]
    assert len(turn.errors) == 1
    assert "oops" in turn.content


@pytest.mark.parametrize("text", ["<tool_call>", '<tool_call>{"name": "a", "arguments": {}}', "x <tool_call> y"])
def test_a_call_that_is_never_closed_is_malformed(text: str) -> None:
    turn = parse_hermes(text)
    assert turn.calls == ()
    assert "never closed" in turn.errors[0]
    assert turn.content == text


def test_an_unclosed_call_does_not_swallow_the_next_one() -> None:
    turn = parse_hermes('<tool_call>{"name": "a"<tool_call>{"name": "b", "arguments": {}}</tool_call>')
    assert [call.name for call in turn.calls] == ["b"]
    assert len(turn.errors) == 1


def test_arguments_may_be_json_text_or_absent() -> None:
    assert parse_hermes(hermes('{"name": "a", "arguments": "{\\"x\\": 1}"}')).calls[0].arguments == '{"x": 1}'
    assert parse_hermes(hermes('{"name": "a"}')).calls[0].arguments == "{}"


def test_lone_surrogates_in_arguments_become_the_replacement_character() -> None:
    (call,) = parse_hermes(hermes('{"name": "a", "arguments": {"x": "\\ud800"}}')).calls
    assert json.loads(call.arguments) == {"x": "\ufffd"}
    call.arguments.encode()


def test_a_call_inside_a_think_block_is_reasoning() -> None:
    thought = f"<think>\nmaybe {hermes('{}')}\n</think>\n\nno"
    assert parse_hermes(thought) == Turn(content="no", reasoning=f"maybe {hermes('{}')}")


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("plain", False, (None, "plain")),
        ("<think>\na\n</think>\n\nb", False, ("a", "b")),
        ("<think>\n\n</think>\n\nb", False, ("", "b")),
        ("<think>\nnever closed", False, ("never closed", "")),
        ("a\n</think>\n\nb", True, ("a", "b")),
        ("a\n</think>\n\nb", False, ("a", "b")),
        ("never closed", True, ("never closed", "")),
        ("said <think>a</think> b", False, ("a", "said b")),
        ("<think>a</think>b</think>c", False, ("a", "b</think>c")),
    ],
)
def test_reasoning_is_the_content_of_the_first_think_block(
    text: str, is_open: bool, expected: tuple[str | None, str]
) -> None:
    assert split_reasoning(text, is_open=is_open) == expected


CALL = '{"name": "a", "arguments": {"text": "%s"}}'


@pytest.mark.parametrize("words", ["say <think>why</think> first", "</think>", "<think>", "</think> <think>"])
@pytest.mark.parametrize(
    ("before", "reasoning"), [("", None), ("<think>\nhm\n</think>\n\n", "hm"), ("<think></think>", "")]
)
def test_think_tags_in_arguments_are_arguments(words: str, before: str, reasoning: str | None) -> None:
    turn = parse_hermes(before + hermes(CALL % words, CALL % words))
    assert [json.loads(call.arguments) for call in turn.calls] == [{"text": words}] * 2
    assert (turn.reasoning, turn.content, turn.errors) == (reasoning, "", ())
    llama = parse_llama3(before + CALL % words, tool_names=["a"])
    assert [json.loads(call.arguments) for call in llama.calls] == [{"text": words}]
    assert (llama.reasoning, llama.content, llama.errors) == (reasoning, "", ())


@pytest.mark.parametrize("body", ['{"name": "a", "arguments": {"text": "</think>"}', "<think>x</think>"])
@pytest.mark.parametrize("close", ["</tool_call>", ""])
def test_a_malformed_call_with_think_tags_is_explained(body: str, close: str) -> None:
    text = f"Well. <tool_call>{body}{close}"
    turn = parse_hermes(text)
    assert (turn.calls, turn.reasoning, turn.content) == ((), None, text)
    assert len(turn.errors) == 1
    turn = parse_llama3(PYTHON_TAG + body)
    assert (turn.calls, turn.reasoning, turn.content) == ((), None, PYTHON_TAG + body)
    assert len(turn.errors) == 1


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "names"),
    [
        ("<think>use <tool_call> now</think>#", False, "use <tool_call> now", ["a"]),
        ("use <tool_call> now</think>#", True, "use <tool_call> now", ["a"]),
        ("<think># no</think>", False, "# no", []),
        ("# no</think>#", True, "# no", ["a"]),
        ("#", True, "#", []),
    ],
)
def test_a_think_block_ends_at_the_first_close_outside_a_well_formed_call(
    text: str, is_open: bool, reasoning: str, names: list[str]
) -> None:
    call = hermes(CALL % "</think>")
    turn = parse_hermes(text.replace("#", call), reasoning_is_open=is_open)
    assert turn.reasoning == reasoning.replace("#", call)
    assert [call.name for call in turn.calls] == names
    assert turn.errors == ()


def test_llama_calls_with_and_without_python_tag() -> None:
    one, two = '{"name": "a", "parameters": {"x": 1}}', '{"name": "b", "parameters": {}}'
    for text in (f"<|python_tag|>{one}; {two}", f"<|python_tag|>{one}\n{two}"):
        assert [call.name for call in parse_llama3(text).calls] == ["a", "b"]
    assert parse_llama3(one, tool_names=["a"]).calls == (ToolCall(name="a", arguments='{"x": 1}'),)
    assert parse_llama3(one) == Turn(content=one)  # a JSON answer: no tools were offered
    assert parse_llama3("plain", tool_names=["a"]) == Turn(content="plain")


@pytest.mark.parametrize("text", ["<|python_tag|>", "<|python_tag|>print(1)", '<|python_tag|>{"name": "a"', "{oops"])
def test_a_malformed_llama_call_is_explained_and_stays_in_the_content(text: str) -> None:
    turn = parse_llama3(text, tool_names=["a"])
    assert turn.calls == ()
    assert len(turn.errors) == 1
    assert turn.content == text


def test_call_ids_are_repeatable_and_distinct_with_nine_letters_and_digits() -> None:
    turn = parse_hermes(hermes('{"name": "a"}', '{"name": "a"}'))
    ids = [call["id"] for call in turn.message([1, 2])["tool_calls"]]
    assert ids == [call["id"] for call in turn.message((1, 2))["tool_calls"]]
    assert len({*ids, turn.message([1, 3])["tool_calls"][0]["id"]}) == 3
    assert all(len(name) == 9 and name.isalnum() for name in ids)


def test_equal_calls_in_two_turns_of_a_conversation_have_different_ids() -> None:
    turn = parse_hermes(hermes('{"name": "a"}'))
    ids = [turn.message([1, 2], prompt_ids=prompt)["tool_calls"][0]["id"] for prompt in ((), [5], (5,), (5, 6), (1, 5))]
    assert ids[1] == ids[2]
    assert len(set(ids)) == 4
    assert all(len(name) == 9 and name.isalnum() for name in ids)


fragments = st.sampled_from(
    [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<|python_tag|>",
        '{"name": "a", "arguments": {}}',
        "{",
        "}",
        ";",
    ]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(fragments, st.text(max_size=4)), max_size=8).map("".join))
def test_parsing_never_raises_and_arguments_are_always_json_objects(text: str) -> None:
    for turn in (parse_hermes(text), parse_llama3(text, tool_names=["a"])):
        assert all(isinstance(json.loads(call.arguments), dict) for call in turn.calls)
        assert turn.message([])["role"] == "assistant"


@pytest.mark.parametrize(
    ("text", "is_open", "is_cut"),
    [
        ("<think>a", False, True),
        ("<think>a</think>", False, False),
        ("a", True, True),
        ("a</think>", True, False),
        ("a", False, False),
        ("a <think>b", False, False),
        ("<think>" + hermes(CALL % "</think>"), False, True),
        (hermes(CALL % "</think>"), False, False),
    ],
)
def test_a_turn_ends_in_its_reasoning_if_no_tag_outside_calls_closes_it(text: str, is_open: bool, is_cut: bool) -> None:
    assert parse_hermes(text, reasoning_is_open=is_open).ends_in_reasoning is is_cut
    assert parse_llama3(text, reasoning_is_open=is_open).ends_in_reasoning is is_cut
    assert parse_harmony("<|channel|>analysis<|message|>a<|end|>").ends_in_reasoning
    assert not parse_harmony(
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b"
    ).ends_in_reasoning


def test_ids_of_calls_depend_on_the_turn_and_stay_the_same() -> None:
    turn = parse_hermes(hermes('{"name": "f"}', '{"name": "f"}'))
    assert [call["id"] for call in turn.message([1, 2, 3], prompt_ids=[4, 5])["tool_calls"]] == [
        "2d8596a6c",
        "f616994a7",
    ]


def test_a_turn_of_thousands_of_calls_costs_work_in_proportion_to_its_length() -> None:
    turn = parse_hermes('<tool_call>{"name":"f"}</tool_call>' * 5000)
    assert cpu_s(lambda: turn.message(range(30_000), prompt_ids=range(1000))) < 2  # 14 s with a hash of all ids each
    text = '{"name":"f"};' * 100_000
    assert cpu_s(lambda: parse_llama3(text, tool_names=["f"])) < 3  # 6 s with a copy of the rest for each
