"""A completion as the JSON of the OpenAI API, whole or as a stream.

Answers are streamed after they were sampled: tool calls and reasoning can only be told from text once a turn is
complete, and the ids and logprobs that go with a message are those of all of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rollout.gateway.completion import Choice, Completion, Decode
from rollout.records import FinishReason

STREAM_END = b"data: [DONE]\n\n"


def completion_body(completion: Completion, *, model: str, wants_logprobs: bool, decode: Decode) -> dict[str, Any]:
    """A `chat.completion`."""
    return {
        **_head(completion, "chat.completion", model),
        "choices": [
            {
                "index": index,
                "message": _message(completion, choice),
                "finish_reason": _finish_reason(choice),
                "logprobs": _logprobs(choice, decode) if wants_logprobs else None,
            }
            for index, choice in enumerate(completion.choices)
        ],
        "usage": _usage(completion),
    }


def completion_events(
    completion: Completion, *, model: str, wants_logprobs: bool, wants_usage: bool, decode: Decode
) -> Iterator[bytes]:
    """The same as server-sent events: per choice its role, its text, its tool calls, and its end with the ids."""
    head = _head(completion, "chat.completion.chunk", model)
    if wants_usage:
        head["usage"] = None
    for index, choice in enumerate(completion.choices):
        logprobs = _logprobs(choice, decode) if wants_logprobs else None
        for delta in _deltas(completion, choice):
            is_last = ID_DELTA_KEY in delta
            chunk = {
                "index": index,
                "delta": delta,
                "logprobs": logprobs if is_last else None,
                "finish_reason": _finish_reason(choice) if is_last else None,
            }
            yield _event({**head, "choices": [chunk]})
    if wants_usage:
        yield _event({**head, "choices": [], "usage": _usage(completion)})
    yield STREAM_END


ID_DELTA_KEY = "generation_token_ids"
"""The delta that has it is the last of its choice."""


def _deltas(completion: Completion, choice: Choice) -> Iterator[dict[str, Any]]:
    message = choice.message
    yield {"role": "assistant", "content": ""}
    if message.get("reasoning_content"):
        yield {"reasoning_content": message["reasoning_content"]}
    if message["content"]:
        yield {"content": message["content"]}
    for index, call in enumerate(message.get("tool_calls", ())):
        # First the name, then the arguments, as clients that put the pieces together expect.
        yield {"tool_calls": [{**call, "index": index, "function": {**call["function"], "arguments": ""}}]}
        yield {"tool_calls": [{"index": index, "function": {"arguments": call["function"]["arguments"]}}]}
    yield _evidence(completion, choice)


def _message(completion: Completion, choice: Choice) -> dict[str, Any]:
    message = {**choice.message, "refusal": None, **_evidence(completion, choice)}
    if message.get("tool_calls") and not message["content"]:
        message["content"] = None
    return message


def _evidence(completion: Completion, choice: Choice) -> dict[str, Any]:
    return {
        "prompt_token_ids": completion.prompt.ids,
        "generation_token_ids": choice.call.sampled_ids,
        "generation_log_probs": choice.call.sampled_logprobs,
    }


def _head(completion: Completion, kind: str, model: str) -> dict[str, Any]:
    return {
        "id": completion.completion_id,
        "object": kind,
        "created": completion.created,
        "model": model,
        "prompt_kind": completion.prompt.kind,
    }


def _finish_reason(choice: Choice) -> str:
    if choice.call.finish_reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if choice.message.get("tool_calls") else "stop"


def _logprobs(choice: Choice, decode: Decode) -> dict[str, Any]:
    content = []
    for token_id, logprob in zip(choice.call.sampled_ids, choice.call.sampled_logprobs, strict=True):
        text = decode([token_id])
        # A token can be a part of a character; it has no text of its own then.
        raw = None if "\ufffd" in text else list(text.encode())
        content.append({"token": text, "bytes": raw, "logprob": logprob, "top_logprobs": []})
    return {"content": content, "refusal": None}


def _usage(completion: Completion) -> dict[str, int]:
    prompt = len(completion.prompt.ids)
    sampled = sum(len(choice.call.sampled_ids) for choice in completion.choices)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"
