"""Tests of replies and streams of the Responses API, and of answers that are continued by their id."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import openai
import pytest

from lockstep.rollout.records import FinishReason
from tests.fixtures.gateway import Running, running
from tests.fixtures.tokenizers import chat_tokenizer

QWEN = chat_tokenizer("qwen3")
TOOL: Any = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
CALLS = (
    "<think>\nhm\n</think>\n\nlooking"
    '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call><|im_end|>'
)


async def ask(server: Running, **options: Any) -> Any:
    return await server.client.responses.create(**{"model": "policy", "input": "say it", **options})


async def events_of(server: Running, path: str, body: Any) -> list[tuple[str, Any]]:
    """Return names and data of the events that the gateway writes, without a client library."""
    headers = {"Authorization": f"Bearer {server.gateway.api_key}"}
    url = f"{server.gateway.base_url}{path}"
    async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=headers) as response:
        assert response.content_type == "text/event-stream"
        blocks = (await response.text()).strip().split("\n\n")
    pairs = [block.split("\n") for block in blocks]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in pairs]


async def test_an_answer_has_items_usage_and_the_ids_of_every_sampled_token():
    async with running(QWEN, CALLS) as server:
        answer = await ask(server, tools=[TOOL], instructions="be brief", include=["message.output_text.logprobs"])
        sampled = QWEN.encode(CALLS)
        extra = answer.model_extra
        assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]
        assert len({item.id for item in answer.output}) == 4
        assert (answer.status, answer.output_text, answer.instructions) == ("completed", "looking", "be brief")
        assert extra["prompt_token_ids"] == list(server.engine.prompts[0])
        assert extra["generation_token_ids"] == sampled
        assert len(extra["generation_log_probs"]) == len(sampled)
        assert extra["prompt_kind"] == "root"
        logprobs = answer.output[1].content[0].logprobs
        assert "".join(token.token for token in logprobs) == CALLS
        usage = answer.usage
        assert (usage.input_tokens, usage.output_tokens) == (len(server.engine.prompts[0]), len(sampled))
        assert usage.total_tokens == usage.input_tokens + usage.output_tokens


async def test_an_answer_that_was_cut_off_is_incomplete():
    async with running(QWEN, "<think>\nhm", "half") as server:
        thought, half = await ask(server), await ask(server)
        for answer in (thought, half):
            assert answer.status == answer.output[-1].status == "incomplete"
            assert answer.incomplete_details.reason == "max_output_tokens"
        assert [item.type for item in thought.output] == ["reasoning"]


async def test_an_empty_answer_has_an_item_to_send_back():
    async with running(QWEN, "<|im_end|>") as server:
        (item,) = (await ask(server)).output
        assert item.content[0].text == ""


async def test_a_stream_has_the_events_of_the_api_in_their_order():
    async with running(QWEN, CALLS) as server:
        body = {"model": "policy", "input": "say it", "tools": [TOOL], "stream": True}
        events = await events_of(server, "/responses", body)
        part = ["output_item.added", "content_part.added", "{}.delta", "{}.done", "content_part.done"]
        names = ["created", "in_progress"]
        names += [name.format("reasoning_text") for name in [*part, "output_item.done"]]
        names += [name.format("output_text") for name in [*part, "output_item.done"]]
        call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done"]
        names += [*call, "output_item.done"] * 2 + ["completed"]
        assert [name for name, _ in events] == [f"response.{name}" for name in names]
        assert [data["type"] for _, data in events] == [name for name, _ in events]
        assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
        final = events[-1][1]["response"]
        done = [data["item"] for name, data in events if name == "response.output_item.done"]
        added = [data["item"] for name, data in events if name == "response.output_item.added"]
        assert done == final["output"]
        assert [item["id"] for item in added] == [item["id"] for item in done]
        assert all(not (item.get("content") or item.get("arguments")) for item in added)
        assert events[0][1]["response"]["id"] == final["id"]
        assert events[0][1]["response"]["output"] == []


async def test_the_client_adds_a_stream_up_to_the_whole_answer():
    async with running(QWEN, CALLS) as server:
        whole = await ask(server, tools=[TOOL])
        options: Any = {"model": "policy", "input": "say it", "tools": [TOOL]}
        async with server.client.responses.stream(**options) as events:
            final = await events.get_final_response()
        for got, want in zip(final.output, whole.output, strict=True):
            dumped = got.model_dump(exclude={"id", "call_id", "parsed_arguments"}, mode="json")
            for part in dumped.get("content") or ():
                part.pop("parsed", None)
            assert dumped == want.model_dump(exclude={"id", "call_id"}, mode="json")
        assert final.usage == whole.usage
        assert final.model_extra["generation_token_ids"] == whole.model_extra["generation_token_ids"]


async def test_a_continued_answer_keeps_the_conversation_but_not_the_instructions():
    async with running(QWEN, "one<|im_end|>") as server:
        first = await ask(server, instructions="be brief")
        second = await ask(server, instructions="be long", previous_response_id=first.id)
        assert second.previous_response_id == first.id
        assert second.model_extra["prompt_kind"] == "history_edited", "other instructions are another history"
        text = server.text(server.engine.prompts[1])
        assert "be long" in text
        assert "be brief" not in text
        third = await ask(server, previous_response_id=second.id)
        assert "be long" not in server.text(server.engine.prompts[2])
        assert [m["role"] for m in server.gateway._anonymous.last_conversation] == ["user", "assistant"] * 3
        assert third.output_text == "one"


async def test_an_answer_cannot_be_continued_in_another_session():
    async with running(QWEN, "one<|im_end|>") as server:
        answer = await server.client_of("a").responses.create(model="policy", input="x")
        for client in (server.client, server.client_of("b")):
            for options in ({"previous_response_id": answer.id}, {}):
                reference: Any = [{"type": "item_reference", "id": answer.output[0].id}]
                with pytest.raises(openai.BadRequestError) as caught:
                    await client.responses.create(model="policy", input="x" if options else reference, **options)
                assert caught.value.code == ("previous_response_not_found" if options else None)


async def test_an_id_selects_between_answers_of_equal_text():
    spellings = [[*QWEN.encode("ab"), *QWEN.encode("<|im_end|>")], [QWEN.encode(c)[0] for c in "ab"]]
    spellings[1] += QWEN.encode("<|im_end|>")
    if spellings[0] == spellings[1]:  # the vocabulary has no token for the pair
        spellings[0] = QWEN.encode("the<|im_end|>")
        spellings[1] = [*(QWEN.encode(c)[0] for c in "the"), *QWEN.encode("<|im_end|>")]
    assert spellings[0] != spellings[1]
    for continues_by_id in (False, True):
        async with running(QWEN, *spellings, "done<|im_end|>") as server:
            first, second = await ask(server), await ask(server)
            assert first.output_text == second.output_text
            more: Any = [{"role": "user", "content": "more"}]
            if continues_by_id:
                await ask(server, input=more, previous_response_id=first.id)
            else:
                await ask(server, input=[{"role": "user", "content": "say it"}, *first.output, *more])
            prompt = list(server.engine.prompts[2])
            start = len(server.engine.prompts[0])
            assert prompt[start : start + len(spellings[0])] == spellings[0], "the first, not the latest"


async def test_reasoning_is_given_back_only_once_in_a_request():
    """Short items that name a long answer must not make a request of any length."""
    async with running(QWEN, "<think>\n" + "long " * 40 + "\n</think>\n\nyes<|im_end|>") as server:
        answer = await ask(server)
        name = answer.id.removeprefix("resp_")
        items: Any = [{"type": "reasoning", "id": f"rs_{i}", "summary": [], "encrypted_content": name} for i in "ab"]
        await ask(server, input=items * 50)
        assert server.text(server.engine.prompts[1]).count("long") <= 40
        reference: Any = [{"type": "item_reference", "id": f"msg_{name}"}] * 2
        with pytest.raises(openai.BadRequestError, match="named before"):
            await ask(server, input=reference)


async def test_a_full_context_is_an_error_about_the_input():
    async with running(QWEN, "one<|im_end|>", max_model_len=64) as server:
        for text in ("word " * 100, "x" * 100_000):
            with pytest.raises(openai.BadRequestError) as caught:
                await ask(server, input=text)
            assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(server, extra_body={"messages": []})
        assert caught.value.param == "messages"


async def test_an_answer_cut_off_by_an_update_may_be_requested_again():
    async with running(QWEN, "one<|im_end|>") as server:
        server.engine.finish = FinishReason.ABORT
        with pytest.raises(openai.InternalServerError):
            await ask(server)
        server.engine.finish = None
        assert (await ask(server)).output_text == "one"
        assert len(server.gateway._anonymous.calls) == 1
