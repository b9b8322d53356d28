"""Replies of chat completions, whole or as a stream of chunks.

The ids of the prompt belong to the completion, as in vLLM's API: messages are sent back with every request, and would
carry the whole conversation once for every turn.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from lockstep.rollout.gateway.dialects.chat_request import read_chat_request
from lockstep.rollout.gateway.dialects.dialect import (
    Dialect,
    Reply,
    data_event,
    evidence,
    is_cut,
    openai_error,
    token_logprobs,
)
from lockstep.rollout.gateway.session import Answer

STREAM_END = b"data: [DONE]\n\n"


def completion_body(reply: Reply) -> dict[str, Any]:
    """Return a `chat.completion`."""
    choices = [
        {"index": index, "message": _message(choice), **_ending(reply, choice)}
        for index, choice in enumerate(reply.completion.choices)
    ]
    prompt = {"prompt_token_ids": reply.completion.prompt.ids, "usage": chat_usage(reply)}
    return {**_head(reply, "chat.completion"), "choices": choices, **prompt}


def completion_events(reply: Reply) -> Iterator[bytes]:
    """Yield the completion as server-sent events: per choice its role, text and tool calls, and an end with the ids."""
    head = _head(reply, "chat.completion.chunk")
    wants_usage = reply.request.wants_usage
    if wants_usage:
        head["usage"] = None
    prompt = {"prompt_token_ids": reply.completion.prompt.ids}  # once, with the first chunk
    for index, choice in enumerate(reply.completion.choices):
        for delta in _deltas(choice):
            chunk = {"index": index, "delta": delta, "finish_reason": None, "logprobs": None}
            yield data_event({**head, **prompt, "choices": [chunk]})
            prompt = {}
        chunk = {"index": index, "delta": evidence(choice), **_ending(reply, choice)}
        yield data_event({**head, "choices": [chunk]})
    if wants_usage:
        yield data_event({**head, "choices": [], "usage": chat_usage(reply)})
    yield STREAM_END


def chat_usage(reply: Reply) -> dict[str, int]:
    return {
        "prompt_tokens": reply.num_prompt,
        "completion_tokens": reply.num_sampled,
        "total_tokens": reply.num_prompt + reply.num_sampled,
    }


def _deltas(choice: Answer) -> Iterator[dict[str, Any]]:
    message = choice.message
    yield {"role": "assistant", "content": ""}
    if message.get("reasoning_content"):
        yield {"reasoning_content": message["reasoning_content"]}
    if message["content"]:
        yield {"content": message["content"]}
    for index, call in enumerate(message.get("tool_calls", ())):
        # Clients that join the pieces expect the name first, then the arguments.
        yield {"tool_calls": [{**call, "index": index, "function": {**call["function"], "arguments": ""}}]}
        yield {"tool_calls": [{"index": index, "function": {"arguments": call["function"]["arguments"]}}]}


def _message(choice: Answer) -> dict[str, Any]:
    message = {**choice.message, "refusal": None, **evidence(choice)}
    if message.get("tool_calls") and not message["content"]:
        message["content"] = None
    return message


def _head(reply: Reply, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{reply.first.name}",
        "object": kind,
        "created": int(time.time()),
        "model": reply.model,
        "prompt_kind": reply.completion.prompt.kind,
    }


def _ending(reply: Reply, choice: Answer) -> dict[str, Any]:
    wants_logprobs = reply.request.wants_logprobs
    logprobs = {"content": token_logprobs(choice, reply.decode), "refusal": None} if wants_logprobs else None
    reason = "tool_calls" if choice.message.get("tool_calls") else "stop"
    return {
        "finish_reason": "length" if is_cut(choice) else reason,
        "logprobs": logprobs,
    }


CHAT_COMPLETIONS = Dialect(
    path="/chat/completions",
    read=read_chat_request,
    body=completion_body,
    events=completion_events,
    error=openai_error,
)
