"""Tests of conversations whose messages are checked and hashed once, and of the work that a long rollout costs."""

from __future__ import annotations

import gc
import json
from typing import Any

import pytest

from lockstep.integrations.gateway import prefix_chain as module
from lockstep.integrations.gateway.errors import ApiError
from lockstep.integrations.gateway.messages import MAX_MESSAGES
from lockstep.integrations.gateway.prefix_chain import Prefixes
from tests.fixtures.cost import cpu_s
from tests.fixtures.gateway import running
from tests.fixtures.tokenizers import chat_tokenizer

QWEN = chat_tokenizer("qwen3")
USER = {"role": "user", "content": "say it"}


def call(name: str, arguments: str, call_id: str = "a") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }


@pytest.mark.parametrize("sends_ids", [True, False])
async def test_a_long_rollout_costs_work_in_proportion_to_its_turns(monkeypatch, sends_ids):
    counted = {"read_message": 0, "normalize_messages": 0}
    for name in counted:
        function = getattr(module, name)

        def counting(*arguments: Any, name: str = name, function: Any = function, **options: Any) -> Any:
            counted[name] += 1
            return function(*arguments, **options)

        monkeypatch.setattr(module, name, counting)
    async with running(QWEN, "hello<|im_end|>", max_model_len=100_000) as server:
        client, messages, seen, sizes = server.client_of("x"), [USER], [], []
        for turn in range(40):
            answer = await client.chat.completions.create(model="policy", messages=messages)
            message = answer.choices[0].message.model_dump(exclude_none=True)
            if not sends_ids:
                message = {key: message[key] for key in ("role", "content")}
            messages += [message, {"role": "user", "content": f"turn {turn}"}]
            assert answer.model_extra["prompt_kind"] == ("extended" if turn else "root")
            seen.append(dict(counted))
            sizes.append(len(json.dumps(messages)))
        assert seen[39]["read_message"] - seen[19]["read_message"] == 20 * 2, "the echoed turn and the new message"
        assert seen[39]["normalize_messages"] - seen[19]["normalize_messages"] == 20 * 4, "these, and the answer twice"
        assert sizes[39] - sizes[38] == sizes[29] - sizes[28], "a turn adds as much to the request, however late it is"


def test_equal_beginnings_are_shared_and_forgotten_with_their_last_holder():
    prefixes = Prefixes()
    first = prefixes.read([USER, {"role": "assistant", "content": "a"}, USER], ())
    again = prefixes.read([USER, {"role": "assistant", "content": "a", "generation_token_ids": [1]}, USER], ())
    assert again is first
    other = prefixes.read([USER, {"role": "assistant", "content": "b"}, USER], ())
    assert other.digest != first.digest
    assert len(prefixes._known) == 6, "the root, the first message, and two each"
    turn = first.up_to_last_turn()
    assert turn is not None
    assert [message["content"] for message in turn.messages] == ["say it", "a"]
    assert first.after(turn) == (USER,)
    del first, again, other, turn
    gc.collect()
    assert len(prefixes._known) == 0


@pytest.mark.parametrize(
    ("one", "other", "are_equal"),
    [
        ([call("f", '{"a": 1}')], [call("f", '{ "a":1 }')], True),
        ([call("f", '{"a": 1}')], [call("f", '{"a": 2}')], False),
        ([call("f", "{}")], [call("f", "{}", call_id="b")], False),
        ([{"role": "assistant", "content": "x", "reasoning": ""}], [{"role": "assistant", "content": "x"}], True),
        (
            [call("f", "{}"), {"role": "tool", "tool_call_id": "a", "content": "x"}],
            [call("f", "{}"), {"role": "tool", "tool_call_id": "a", "content": "x", "name": "f"}],
            True,
        ),
        (
            [call("f", "{}"), {"role": "tool", "tool_call_id": "a", "content": "x"}],
            [call("f", "{}"), {"role": "tool", "tool_call_id": "a", "content": "x", "name": "g"}],
            False,
        ),
        ([USER, {"role": "user", "content": "b"}], [{"role": "user", "content": "b"}, USER], False),
    ],
)
def test_digests_compare_what_a_model_reads(one, other, are_equal):
    prefixes = Prefixes()
    assert (prefixes.read(one, ()).digest == prefixes.read(other, ()).digest) is are_equal
    assert prefixes.read(one, ()).digest != prefixes.read(one, ({"type": "function"},)).digest


def test_a_result_has_the_name_of_the_latest_call_with_its_id():
    result = {"role": "tool", "tool_call_id": "a", "content": "x"}
    conversation = [call("f", "{}"), call("g", "{}", call_id="b"), call("h", "{}"), result]
    named, wrong = ([*conversation[:-1], {**result, "name": name}] for name in ("h", "f"))
    prefixes = Prefixes()
    digest = prefixes.read(conversation, ()).digest
    assert digest == prefixes.read(named, ()).digest
    assert digest != prefixes.read(wrong, ()).digest
    begun = prefixes.read(conversation[:-1], ())
    assert digest == prefixes.read(conversation, ()).digest, "the calls are in messages that are known"
    assert begun.messages == tuple(prefixes.read(conversation, ()).messages[:-1])


def test_results_without_a_call_cost_work_in_proportion_to_their_number():
    results = [{"role": "tool", "tool_call_id": "x", "content": str(number)} for number in range(MAX_MESSAGES)]
    assert cpu_s(lambda: Prefixes().read(results, ())) < 10  # minutes with a search of all messages for each


def test_token_ids_on_a_message_of_another_role_are_refused_after_the_message_is_known():
    prefixes = Prefixes()
    known = prefixes.read([USER], ())
    with pytest.raises(ApiError, match=r"messages\[0\] has token ids"):
        prefixes.read([{**USER, "generation_token_ids": [1]}], ())
    assert known.message == USER


def test_whole_numbers_in_arguments_compare_by_their_value():
    def digest(arguments: str) -> bytes:
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return Prefixes().read([{"role": "assistant", "content": "1.0", "tool_calls": [call]}], ()).digest

    sampled = digest('{"a": 1.0, "b": [{"c": -2.0}], "d": 0.5}')
    assert digest('{"b": [{"c": -2}], "a": 1, "d": 0.5}') == sampled, "as a client in JavaScript sends it back"
    for other in ('{"a": 1.5, "b": [{"c": -2}], "d": 0.5}', '{"a": "1.0", "b": [{"c": -2}], "d": 0.5}'):
        assert digest(other) != sampled
    assert digest('{"a": 1e999}') == digest('{"a": Infinity}')
