"""Conversion of a completion to the JSON of the OpenAI API, whole or as a stream.

A stream is sent after sampling: tool calls and reasoning can only be told from text in a complete turn, and the ids and
logprobs of a message cover the whole turn. The ids of the prompt belong to the completion, as in vLLM's API: messages
are sent back with every request, and would carry the whole conversation once for every turn.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from typing import Any

from rollout.gateway.completion import Completion, Decode
from rollout.gateway.session import Answer
from rollout.records import FinishReason

STREAM_END = b"data: [DONE]\n\n"


def completion_body(completion: Completion, *, model: str, decode: Decode) -> dict[str, Any]:
    """Return a `chat.completion`."""
    choices = [
        {"index": index, "message": _message(choice), **_ending(completion, choice, decode)}
        for index, choice in enumerate(completion.choices)
    ]
    prompt = {"prompt_token_ids": completion.prompt.ids, "usage": _usage(completion)}
    return {**_head(completion, "chat.completion", model), "choices": choices, **prompt}


def completion_events(completion: Completion, *, model: str, decode: Decode) -> Iterator[bytes]:
    """Yield the completion as server-sent events: per choice its role, text and tool calls, and an end with the ids."""
    head = _head(completion, "chat.completion.chunk", model)
    wants_usage = completion.request.wants_usage
    if wants_usage:
        head["usage"] = None
    prompt = {"prompt_token_ids": completion.prompt.ids}  # once, with the first chunk
    for index, choice in enumerate(completion.choices):
        for delta in _deltas(choice):
            chunk = {"index": index, "delta": delta, "finish_reason": None, "logprobs": None}
            yield _event({**head, **prompt, "choices": [chunk]})
            prompt = {}
        chunk = {"index": index, "delta": _evidence(choice), **_ending(completion, choice, decode)}
        yield _event({**head, "choices": [chunk]})
    if wants_usage:
        yield _event({**head, "choices": [], "usage": _usage(completion)})
    yield STREAM_END


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
    message = {**choice.message, "refusal": None, **_evidence(choice)}
    if message.get("tool_calls") and not message["content"]:
        message["content"] = None
    return message


def _evidence(choice: Answer) -> dict[str, Any]:
    return {
        "generation_token_ids": choice.call.sampled_ids,
        "generation_log_probs": choice.call.sampled_logprobs,
    }


def _head(completion: Completion, kind: str, model: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "prompt_kind": completion.prompt.kind,
    }


def _ending(completion: Completion, choice: Answer, decode: Decode) -> dict[str, Any]:
    reason = "tool_calls" if choice.message.get("tool_calls") else "stop"
    return {
        "finish_reason": "length" if choice.call.finish_reason is FinishReason.LENGTH else reason,
        "logprobs": _logprobs(choice, decode) if completion.request.wants_logprobs else None,
    }


def _logprobs(choice: Answer, decode: Decode) -> dict[str, Any]:
    content = []
    for token_id, logprob in zip(choice.call.sampled_ids, choice.call.sampled_logprobs, strict=True):
        text = decode([token_id])
        # A token may be part of a character; it then has no text of its own.
        raw = None if "\ufffd" in text else list(text.encode())
        content.append({"token": text, "bytes": raw, "logprob": logprob, "top_logprobs": []})
    return {"content": content, "refusal": None}


def _usage(completion: Completion) -> dict[str, int]:
    prompt = len(completion.prompt.ids)
    sampled = sum(len(choice.call.sampled_ids) for choice in completion.choices)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"
