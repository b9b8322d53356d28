"""Tests of replies, streams and errors of the Messages API."""

from __future__ import annotations

from typing import Any

import aiohttp
import anthropic
import pytest

from lockstep.rollout.errors import EngineError
from tests.fixtures.gateway import Running, running
from tests.fixtures.tokenizers import chat_tokenizer
from tests.unit.integrations.gateway.dialects.test_responses import CALLS, events_of

QWEN = chat_tokenizer("qwen3")
USER = {"role": "user", "content": "say it"}
TOOL: Any = {"name": "f", "input_schema": {"type": "object"}}


async def ask(server: Running, **options: Any) -> Any:
    async with server.anthropic() as client:
        return await client.messages.create(
            **{"model": "policy", "max_tokens": 256, "messages": [USER], "tools": [TOOL], **options}
        )


async def test_an_answer_has_blocks_usage_and_the_ids_of_every_sampled_token():
    async with running(QWEN, CALLS) as server:
        answer = await ask(server)
        sampled = QWEN.encode(CALLS)
        assert [block.type for block in answer.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert answer.content[0].thinking == "hm"
        assert [block.input for block in answer.content[2:]] == [{"a": 1}, {}]
        assert (answer.stop_reason, answer.stop_sequence, answer.role) == ("tool_use", None, "assistant")
        assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(server.engine.prompts[0]), len(sampled))
        assert answer.model_extra["prompt_token_ids"] == list(server.engine.prompts[0])
        assert answer.model_extra["generation_token_ids"] == sampled
        assert len(answer.model_extra["generation_log_probs"]) == len(sampled)
        assert answer.model_extra["prompt_kind"] == "root"


async def test_the_reason_of_the_end_is_that_of_the_api():
    async with running(QWEN, "one<|im_end|>", "half", "one STOP two<|im_end|>") as server:
        reasons = [await ask(server, stop_sequences=["STOP", "never"]) for _ in range(3)]
        assert [(answer.stop_reason, answer.stop_sequence) for answer in reasons] == [
            ("end_turn", None),
            ("max_tokens", None),
            ("stop_sequence", "STOP"),
        ]
        assert reasons[2].content[0].text == "one "


async def test_an_answer_with_one_call_ends_there():
    async with running(QWEN, CALLS) as server:
        answer = await ask(server, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
        assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]


async def test_arguments_that_json_does_not_have_become_null():
    call = '<tool_call>\n{"name": "f", "arguments": {"a": [NaN, 1e999], "b": {"c": -Infinity}}}\n</tool_call><|im_end|>'
    async with running(QWEN, call) as server:
        answer = await ask(server)
        assert answer.content[0].input == {"a": [None, None], "b": {"c": None}}


async def test_a_stream_has_the_events_of_the_api_in_their_order():
    async with running(QWEN, CALLS) as server:
        body = {"model": "policy", "max_tokens": 256, "messages": [USER], "tools": [TOOL], "stream": True}
        events = await events_of(server, "/messages", body)
        block = ["content_block_start", "content_block_delta", "content_block_stop"]
        thinking = ["content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"]
        names = ["message_start", *thinking, *block * 3, "message_delta", "message_stop"]
        assert [name for name, _ in events] == [data["type"] for _, data in events] == names
        deltas = [data["delta"]["type"] for name, data in events if name == "content_block_delta"]
        assert deltas == ["thinking_delta", "signature_delta", "text_delta", "input_json_delta", "input_json_delta"]
        assert [data["index"] for name, data in events if name == "content_block_start"] == [0, 1, 2, 3]
        start, end = events[0][1]["message"], events[-2][1]
        assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
        assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
        assert end["usage"]["output_tokens"] == len(QWEN.encode(CALLS))


async def test_the_client_adds_a_stream_up_to_the_whole_answer():
    async with running(QWEN, CALLS) as server, server.anthropic() as client:
        whole = await ask(server)
        options: Any = {"max_tokens": 256, "messages": [USER], "tools": [TOOL]}
        async with client.messages.stream(model="policy", **options) as events:
            final = await events.get_final_message()
        left_out: Any = {"id": True, "content": {"__all__": {"id", "signature", "parsed_output"}}}
        assert final.model_dump(exclude=left_out) == whole.model_dump(exclude=left_out)


async def test_a_signature_without_its_text_stands_for_the_reasoning():
    async with running(QWEN, "<think>\nhm\n</think>\n\nyes<|im_end|>", "done<|im_end|>") as server:
        first = await ask(server)
        thinking = {"type": "thinking", "thinking": "", "signature": first.content[0].signature}
        turn = {"role": "assistant", "content": [thinking, first.content[1]]}
        second = await ask(server, messages=[USER, turn, USER])
        assert second.model_extra["prompt_kind"] == "extended"


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"thinking": "edited"}, "turn_edited"),
        ({"thinking": "edited", "signature": "of another server"}, "not_sampled"),
        ({"signature": "of another server"}, "extended"),
    ],
)
async def test_thinking_that_was_changed_branches(change, kind):
    async with running(QWEN, "<think>\nhm\n</think>\n\nyes<|im_end|>", "done<|im_end|>") as server:
        first = await ask(server)
        turn = {"role": "assistant", "content": [{**first.content[0].to_dict(), **change}, first.content[1]]}
        second = await ask(server, messages=[USER, turn, USER])
        assert second.model_extra["prompt_kind"] == kind


async def test_errors_become_exceptions_of_the_client():
    async with running(QWEN, "one<|im_end|>", max_model_len=400) as server, server.anthropic() as client:
        options: Any = {"max_tokens": 5, "messages": [USER]}
        wrong_key = client.with_options(api_key="wrong")
        long: Any = [{"role": "user", "content": "x " * 9999}]
        for asked, changes, error in (
            (wrong_key, {}, anthropic.AuthenticationError),
            (client, {"model": "claude"}, anthropic.NotFoundError),
            (client, {"extra_body": {"temperature": 0.5}}, anthropic.BadRequestError),
            (client, {"messages": long}, anthropic.BadRequestError),
        ):
            with pytest.raises(error) as caught:
                await asked.messages.create(**{"model": "policy", **options, **changes})
            assert caught.value.body["type"] == "error"
            assert set(caught.value.body["error"]) == {"type", "message"}
        server.engine.error = EngineError("dead\nlog line")
        with pytest.raises(anthropic.InternalServerError) as caught:
            await client.messages.create(model="policy", **options)
        assert caught.value.body["error"]["type"] == "api_error"
        assert "log line" not in caught.value.response.text


async def test_the_base_url_works_with_the_version_that_the_client_adds_and_without():
    async with running(QWEN, "one<|im_end|>") as server:
        assert server.gateway.base_url.endswith("/v1")
        for url in (server.gateway.base_url, server.gateway.base_url.removesuffix("/v1")):
            async with anthropic.AsyncAnthropic(base_url=url, api_key=server.gateway.api_key) as client:
                options: Any = {"model": "policy", "messages": [USER], "system": "be brief"}
                count = await client.messages.count_tokens(**options)
                answer = await client.messages.create(max_tokens=5, **options)
                assert count.input_tokens == answer.usage.input_tokens


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": "{key}"}, 200),
        ({"x-api-key": "wrong"}, 401),
        ({}, 401),
        ({"x-api-key": "{key}", "Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Bearer {key}"}, 200),
    ],
)
async def test_the_key_is_in_either_header(headers, status):
    async with running(QWEN, "one<|im_end|>") as server, aiohttp.ClientSession() as http:
        sent = {name: value.format(key=server.gateway.api_key) for name, value in headers.items()}
        body = {"model": "policy", "max_tokens": 5, "messages": [USER]}
        async with http.post(f"{server.gateway.base_url}/messages", json=body, headers=sent) as response:
            assert response.status == status
            assert (await response.json())["type"] == ("message" if status == 200 else "error")
