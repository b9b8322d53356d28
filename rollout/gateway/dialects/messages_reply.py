"""Replies of Anthropic's Messages API, whole or as a stream of events.

The reply has the fields of chat completions that carry token evidence: `prompt_kind`, `prompt_token_ids`,
`generation_token_ids` and `generation_log_probs`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.rollout.gateway.dialects.dialect import Dialect, Reply, evidence, is_cut, named_event
from lockstep.rollout.gateway.dialects.messages_request import read_message_request
from lockstep.rollout.gateway.errors import ApiError

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Names of errors by status; others are `invalid_request_error` below 500 and `api_error` from there on."""


def message_body(reply: Reply) -> dict[str, Any]:
    """Return a `message`."""
    return {
        "id": f"msg_{reply.first.name}",
        "type": "message",
        "role": "assistant",
        "model": reply.model,
        "content": _blocks(reply),
        **_ending(reply),
        "usage": {
            "input_tokens": reply.num_prompt,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": reply.num_sampled,
        },
        "prompt_kind": reply.completion.prompt.kind,
        "prompt_token_ids": reply.completion.prompt.ids,
        **evidence(reply.first),
    }


def message_events(reply: Reply) -> Iterator[bytes]:
    """Yield the message as server-sent events."""
    return map(named_event, _events(reply))


def message_error(error: ApiError) -> dict[str, Any]:
    """Return an error in the form that Anthropic's client libraries turn into their own exceptions."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": None}


def _events(reply: Reply) -> Iterator[dict[str, Any]]:
    whole = message_body(reply)
    start = {**whole, "content": [], "stop_reason": None, "stop_sequence": None}
    yield {"type": "message_start", "message": {**start, "usage": {**whole["usage"], "output_tokens": 0}}}
    for index, block in enumerate(whole["content"]):
        empty, deltas = _delta_parts(block)
        yield {"type": "content_block_start", "index": index, "content_block": {**block, **empty}}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    yield {"type": "message_delta", "delta": _ending(reply), "usage": whole["usage"]}
    yield {"type": "message_stop"}


def _delta_parts(block: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[dict[str, Any]]]:
    """Return the fields of a block that are empty at its start, and the deltas that fill them."""
    if block["type"] == "text":
        return {"text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "tool_use":
        return {"input": {}}, [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
    return {"thinking": "", "signature": ""}, [
        {"type": "thinking_delta", "thinking": block["thinking"]},
        {"type": "signature_delta", "signature": block["signature"]},
    ]


def _ending(reply: Reply) -> dict[str, Any]:
    choice = reply.first
    if is_cut(choice):
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if choice.message.get("tool_calls"):
        return {"stop_reason": "tool_use", "stop_sequence": None}
    return {"stop_reason": "end_turn" if choice.stop is None else "stop_sequence", "stop_sequence": choice.stop}


def _blocks(reply: Reply) -> list[dict[str, Any]]:
    """Return the content of the answer: at least one block, because clients read the first."""
    message = reply.first.message
    reasoning, calls = message.get("reasoning_content"), message.get("tool_calls", ())
    blocks: list[dict[str, Any]] = []
    if reasoning:
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": reply.first.name})
    if message["content"] or not (reasoning or calls):
        blocks.append({"type": "text", "text": message["content"], "citations": None})
    for call in calls:
        function = call["function"]
        value = _finite(json.loads(function["arguments"]))
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": value})
    return blocks


def _finite(value: Any) -> Any:
    """Return a JSON value of the model with null for NaN and infinity, which Python reads and JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


MESSAGES = Dialect(
    path="/messages",
    read=read_message_request,
    body=message_body,
    events=message_events,
    error=message_error,
)
