"""Replies of OpenAI's Responses API, whole or as a stream of events.

The reply has the fields of chat completions that carry token evidence: `prompt_kind`, `prompt_token_ids`,
`generation_token_ids` and `generation_log_probs`. Items do not repeat them; their ids name the answer.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.rollout.gateway.dialects.dialect import (
    Dialect,
    Reply,
    evidence,
    is_cut,
    named_event,
    openai_error,
    token_logprobs,
)
from lockstep.rollout.gateway.dialects.responses_items import item_ids
from lockstep.rollout.gateway.dialects.responses_request import ENCRYPTED, RESPONSE_ID, read_response_request

Event = dict[str, Any]


def response_body(reply: Reply) -> dict[str, Any]:
    """Return a `response`."""
    return {
        **_open_response(reply),
        "status": _status(reply),
        "completed_at": int(time.time()),
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut(reply.first) else None,
        "output": _items(reply),
        "usage": {
            "input_tokens": reply.num_prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": reply.num_sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.num_prompt + reply.num_sampled,
        },
        "prompt_token_ids": reply.completion.prompt.ids,
        **evidence(reply.first),
    }


def response_events(reply: Reply) -> Iterator[bytes]:
    """Yield the response as server-sent events, numbered in their order."""
    for number, event in enumerate(_events(reply)):
        yield named_event({**event, "sequence_number": number})


def _events(reply: Reply) -> Iterator[Event]:
    yield {"type": "response.created", "response": _open_response(reply)}
    yield {"type": "response.in_progress", "response": _open_response(reply)}
    whole = response_body(reply)
    for index, item in enumerate(whole["output"]):
        empty = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        place = {"output_index": index}
        yield {"type": "response.output_item.added", **place, "item": {**item, **empty, "status": "in_progress"}}
        yield from _deltas(item, {**place, "item_id": item["id"]})
        yield {"type": "response.output_item.done", **place, "item": item}
    yield {"type": f"response.{whole['status']}", "response": whole}


def _deltas(item: Mapping[str, Any], place: Mapping[str, Any]) -> Iterator[Event]:
    if item["type"] == "function_call":
        name, arguments = item["name"], item["arguments"]
        yield {"type": "response.function_call_arguments.delta", **place, "delta": arguments}
        yield {"type": "response.function_call_arguments.done", **place, "name": name, "arguments": arguments}
        return
    (part,) = item["content"]
    place = {**place, "content_index": 0}
    yield {"type": "response.content_part.added", **place, "part": {**part, "text": ""}}
    logprobs = {"logprobs": part["logprobs"]} if part["type"] == "output_text" else {}
    yield {"type": f"response.{part['type']}.delta", **place, "delta": part["text"], **logprobs}
    yield {"type": f"response.{part['type']}.done", **place, "text": part["text"], **logprobs}
    yield {"type": "response.content_part.done", **place, "part": part}


def _open_response(reply: Reply) -> dict[str, Any]:
    """Return the response before anything is sampled: what the request asked for."""
    request = reply.request
    messages = request.conversation.messages
    return {
        "id": f"{RESPONSE_ID}{reply.first.name}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": messages[0]["content"] if request.num_instructions else None,
        "max_output_tokens": request.sampling.max_tokens,
        "metadata": {},
        "model": reply.model,
        "output": [],
        "parallel_tool_calls": not request.one_call,
        "previous_response_id": request.echo["previous_response_id"],
        "reasoning": {"effort": None, "summary": None},
        "store": True,
        "temperature": request.sampling.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [{"type": "function", **tool["function"], "strict": False} for tool in request.conversation.tools],
        "top_p": request.sampling.top_p,
        "truncation": "disabled",
        "usage": None,
        "prompt_kind": reply.completion.prompt.kind,
    }


def _status(reply: Reply) -> str:
    return "incomplete" if is_cut(reply.first) else "completed"


def _items(reply: Reply) -> list[dict[str, Any]]:
    """Return the items of the answer: at least one, so that the client can send the turn back."""
    message = reply.first.message
    reasoning, calls = message.get("reasoning_content"), message.get("tool_calls", ())
    reasoning_id, text_id, call_ids = item_ids(message, reply.first.name)
    items: list[dict[str, Any]] = []
    if reasoning:
        encrypted = {"encrypted_content": reply.first.name} if ENCRYPTED in reply.request.echo["include"] else {}
        content = [{"type": "reasoning_text", "text": reasoning}]
        items.append({"id": reasoning_id, "type": "reasoning", "summary": [], "content": content, **encrypted})
    if message["content"] or not (reasoning or calls):
        logprobs = token_logprobs(reply.first, reply.decode) if reply.request.wants_logprobs else []
        part = {"type": "output_text", "text": message["content"], "annotations": [], "logprobs": logprobs}
        items.append({"id": text_id, "type": "message", "role": "assistant", "content": [part]})
    for call_id, call in zip(call_ids, calls, strict=True):
        items.append({"id": call_id, "type": "function_call", "call_id": call["id"], **call["function"]})
    # Only the last item can be cut off.
    return [{**item, "status": "completed"} for item in items[:-1]] + [{**items[-1], "status": _status(reply)}]


RESPONSES = Dialect(
    path="/responses",
    read=read_response_request,
    body=response_body,
    events=response_events,
    error=functools.partial(openai_error, messages="input"),
)
