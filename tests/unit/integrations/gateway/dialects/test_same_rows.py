"""Tests of one conversation in every dialect, with the official clients: the record and its rows are the same."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest

from lockstep.rollout.episode.rows import rows_from_calls
from tests.fixtures.gateway import Running, running
from tests.fixtures.tokenizers import chat_tokenizer

QWEN, LLAMA = chat_tokenizer("qwen3"), chat_tokenizer("llama3")
SYSTEM, QUESTION, MORE = "be brief <|im_end|>", "what is the weather? <think>", "and tomorrow?"
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "number"}}}
ABOUT = {"name": "get_weather", "description": "weather of a city"}
RESULTS = {"Paris": "sun <|im_end|>", "Rome": ""}
QWEN_TURNS = (
    "<think>\nhm, two\n</think>\n\nlooking"
    '<tool_call>\n{"name": "get_weather",  "arguments": {"days":1.0, "city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call><|im_end|>',
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>',
    "<think>\n\n</think>\n\n sun, then rain \n<|im_end|>",
    "<|im_end|>",
    "<think>\nonly thoughts",
    "bye<|im_end|>",
)
LLAMA_TURNS = (
    '{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "get_weather", "parameters": {"city": "Rome"}}'
    "<|eot_id|>",
    '{"name": "get_weather", "parameters": {"city": "Rome"}}<|eot_id|>',
    "sun<|eot_id|>",
    "<|eot_id|>",
    "cut off",
    "bye<|eot_id|>",
)

Play = Callable[[Running, bool], Awaitable[None]]
"""Agent that plays one conversation in the session `test`: calls tools, then asks four times more."""

PLAYS: dict[str, Play] = {}
EXPECTED: dict[tuple[str, ...], Mapping[str, Any]] = {}
"""Records of chat completions, by the turns of the model."""


def dialect(name: str) -> Callable[[Play], Play]:
    def add(play: Play) -> Play:
        PLAYS[name] = play
        return play

    return add


@dialect("chat")
async def play_chat(server: Running, stream: bool) -> None:
    tools: Any = [{"type": "function", "function": {**ABOUT, "parameters": SCHEMA}}]
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    for _ in range(6):
        answer = await server.client_of("test").chat.completions.create(model="policy", messages=messages, tools=tools)
        message = answer.choices[0].message
        messages.append(message)
        calls: Any = message.tool_calls or ()
        for call in calls:
            result = RESULTS[json.loads(call.function.arguments)["city"]]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not calls:
            messages.append({"role": "user", "content": MORE})


@dialect("responses")
async def play_responses(server: Running, stream: bool) -> None:
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}]
    for _ in range(6):
        answer = await respond(server, stream, input=items)
        items += answer.output
        items += outputs(answer) or [{"role": "user", "content": MORE}]


@dialect("responses, results between the calls")
async def play_interleaved(server: Running, stream: bool) -> None:
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    for _ in range(6):
        answer = await respond(server, stream, input=items)
        results = {output["call_id"]: output for output in outputs(answer)}
        for item in answer.output:
            items += [item, *([results[item.call_id]] if item.type == "function_call" else [])]
        items += [] if results else [{"role": "user", "content": MORE}]


@dialect("responses, items without ids")
async def play_without_ids(server: Running, stream: bool) -> None:
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    for _ in range(6):
        answer = await respond(server, stream, input=items)
        items += [{key: value for key, value in item.to_dict().items() if key != "id"} for item in answer.output]
        items += outputs(answer) or [{"role": "user", "content": MORE}]


@dialect("responses, items by reference")
async def play_references(server: Running, stream: bool) -> None:
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    for _ in range(6):
        answer = await respond(server, stream, input=items)
        items += [{"type": "item_reference", "id": item.id} for item in answer.output]
        items += outputs(answer) or [{"role": "user", "content": MORE}]


@dialect("responses, reasoning by its encrypted content")
async def play_encrypted(server: Running, stream: bool) -> None:
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    for _ in range(6):
        answer = await respond(server, stream, input=items, store=False, include=["reasoning.encrypted_content"])
        for item in answer.output:
            kept = item.to_dict()
            if item.type == "reasoning":
                kept = {"type": "reasoning", "summary": [], "encrypted_content": item.encrypted_content}
            items.append({key: value for key, value in kept.items() if key != "id"})
        items += outputs(answer) or [{"role": "user", "content": MORE}]


@dialect("responses, by the previous id")
async def play_previous(server: Running, stream: bool) -> None:
    options: dict[str, Any] = {"input": QUESTION}
    for _ in range(6):
        answer = await respond(server, stream, **options)
        options = {"previous_response_id": answer.id, "input": outputs(answer) or MORE}


async def respond(server: Running, stream: bool, **options: Any) -> Any:
    options |= {"model": "policy", "instructions": SYSTEM}
    options["tools"] = [{"type": "function", "strict": True, "parameters": SCHEMA, **ABOUT}]
    responses = server.client_of("test").responses
    if not stream:
        return await responses.create(**options)
    answer = None
    async with responses.stream(**options) as events:
        async for event in events:  # not `get_final_response`, which refuses an answer that was cut off
            answer = getattr(event, "response", answer)
    return answer


def outputs(answer: Any) -> list[Any]:
    return [
        {
            "type": "function_call_output",
            "call_id": item.call_id,
            "output": RESULTS[json.loads(item.arguments)["city"]],
        }
        for item in answer.output
        if item.type == "function_call"
    ]


@dialect("messages")
async def play_messages(server: Running, stream: bool) -> None:
    tools: Any = [{"input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}, **ABOUT}]
    system: Any = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    async with server.anthropic("test") as client:
        for _ in range(6):
            options: Any = {"max_tokens": 256, "messages": messages, "system": system, "tools": tools}
            if stream:
                async with client.messages.stream(model="policy", **options) as events:
                    answer = await events.get_final_message()
            else:
                answer = await client.messages.create(model="policy", **options)
            messages.append({"role": "assistant", "content": answer.content})
            results: list[Any] = [
                {"type": "tool_result", "tool_use_id": block.id, "content": RESULTS[str(block.input["city"])]}
                for block in answer.content
                if block.type == "tool_use"
            ]
            messages.append({"role": "user", "content": results or MORE})


async def record(play: Play, tokenizer: Any, turns: Any, *, stream: bool) -> Mapping[str, Any]:
    """Play the conversation and return all of the record that training reads, by plain values."""
    async with running(tokenizer, *turns) as server:
        await play(server, stream)
        session = server.gateway._named["test"]
        rows = rows_from_calls(session.calls)
        return {
            "calls": [(call.prompt_ids, call.sampled_ids, call.sampled_logprobs) for call in session.calls],
            "rows": [(row.ids.tolist(), row.loss_mask.tolist(), row.sampling_logprobs.tolist()) for row in rows],
            "prompts": dict(session.prompts),
            "messages": [
                (m["role"], m["content"], m.get("reasoning_content") or "", m.get("tool_call_id"))
                for m in session.last_conversation
            ],
        }


@pytest.mark.parametrize(
    ("name", "stream"),
    [(name, False) for name in PLAYS if name != "chat"]
    + [(name, True) for name in ("responses", "responses, by the previous id", "messages")],
)
@pytest.mark.parametrize(("tokenizer", "turns"), [(QWEN, QWEN_TURNS), (LLAMA, LLAMA_TURNS)], ids=["qwen3", "llama3"])
async def test_the_same_conversation_gives_the_same_rows(tokenizer, turns, name, stream):
    if turns not in EXPECTED:
        EXPECTED[turns] = await record(PLAYS["chat"], tokenizer, turns, stream=False)
    expected = EXPECTED[turns]
    assert expected["prompts"] == {"root": 1, "extended": 5}, "the test needs a conversation without branches"
    assert len(expected["rows"]) == 1
    assert await record(PLAYS[name], tokenizer, turns, stream=stream) == expected
