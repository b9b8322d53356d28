"""Anthropic's Messages API: requests, and replies, whole or as a stream of events.

The reply has the fields of chat completions that carry token evidence: `prompt_kind`, `prompt_token_ids`,
`generation_token_ids` and `generation_log_probs`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lockstep.integrations.gateway.dialects.dialect import Dialect, Reply, evidence, is_cut, named_event
from lockstep.integrations.gateway.dialects.fields import (
    DISTRIBUTION,
    FieldTable,
    read_flag,
    read_function_tools,
    read_sampling,
    read_stop_strings,
    read_tool_choice,
)
from lockstep.integrations.gateway.dialects.turn import Recorded, Turn, function_call
from lockstep.integrations.gateway.errors import ApiError, checked, not_supported, quoted, wrong_type
from lockstep.integrations.gateway.messages import (
    MAX_MESSAGES,
    Content,
    StoredImage,
    joined,
    part_type,
    read_last_ids,
    read_text,
    refuse_many,
    unread_part,
)
from lockstep.integrations.gateway.request import Offer, SampleRequest
from lockstep.integrations.gateway.session import Session, TurnMark
from lockstep.rollout.records import Message
from lockstep.rollout.replies import with_null

Block = Mapping[str, Any]

FIELDS = FieldTable(
    read=frozenset({"model", "messages", "max_tokens", "system", "tools", "tool_choice", "stop_sequences", "stream"})
    | {"thinking", "output_config", *DISTRIBUTION},
    ignored=frozenset({"metadata", "service_tier", "inference_geo", "cache_control", "diagnostics"})
    | {"user_profile_id", "workspace_id"},
    neutral={"speed": "standard"},
    refused={
        "container": "the gateway runs no code",
        "mcp_servers": "the gateway calls no servers; list their tools in `tools` and call them in the agent",
        "context_management": "a conversation that is edited on the way is another one than the model had",
        "output_format": "training needs unmodified samples",
    },
)


def read_message_request(body: Mapping[str, Any], offer: Offer) -> SampleRequest:
    """Check a request. Raises `ApiError` (400) with the field and the expected value."""
    FIELDS.check(body)
    if body.get("max_tokens") is None:
        raise ApiError("max_tokens: field required; expected an integer", param="max_tokens")
    sampling = read_sampling(body, offer.sampling, limits=("max_tokens",))
    tools = read_function_tools(
        body.get("tools"),
        expected='{"name": ..., "description": ..., "input_schema": {...}}',
        kinds=("custom", None),
        schema="input_schema",
    )
    choice = {} if body.get("tool_choice") is None else body["tool_choice"]
    checked(choice, dict, "tool_choice", expected="an object with a type")
    _check_thinking(body.get("thinking"))
    _check_output(body.get("output_config"))
    transcript = Transcript(offer.session)
    messages = checked(body.get("messages"), list, "messages", expected="a list with at least one message")
    refuse_many(messages, MAX_MESSAGES, "messages")
    if body.get("system") is not None:
        transcript.messages.append({"role": "system", "content": _text_of(body["system"], "system")})
    for index, message in enumerate(messages):
        transcript.add(message, f"messages[{index}]")
    if not messages or messages[-1]["role"] == "assistant":
        raise not_supported(
            "messages",
            why="the last message must be one of the user: the gateway does not continue a turn of the assistant",
        )
    return SampleRequest(
        conversation=offer.session.prefixes.read(transcript.messages, tools),
        mark=TurnMark(sampled_ids=read_last_ids(messages), name=transcript.last_name),
        sampling=sampling,
        must_call=read_tool_choice(_as_in_chat(choice), tools),
        one_call=read_flag(choice, "disable_parallel_tool_use"),
        stop_strings=read_stop_strings(body, "stop_sequences"),
        stream=read_flag(body, "stream"),
    )


class Transcript:
    """Messages in the inner form, which those of a request are translated to."""

    def __init__(self, session: Session) -> None:
        self.messages: list[Message] = []
        self.last_name: str | None = None
        """Name of the answer that the last assistant message is said to be."""
        self._recorded = Recorded(session)

    def add(self, message: Any, where: str) -> None:
        """Add a message of a request. Raises `ApiError` (400) with the field."""
        checked(message, dict, where, expected="an object with role and content")
        role, content = message.get("role"), message.get("content")
        if role != "assistant" and message.get("generation_token_ids") is not None:
            raise ApiError(f"{where} has token ids, but its role is {quoted(role)}; only sampled messages have ids")
        if role == "assistant":
            self._add_turn(content, f"{where}.content")
        elif role == "user":
            self._add_user(content, f"{where}.content")
        elif role == "system":
            self.messages.append({"role": "system", "content": _text_of(content, f"{where}.content")})
        else:
            raise wrong_type(f"{where}.role", role, expected="user, assistant or system")

    def _add_user(self, content: Any, where: str) -> None:
        """Add a message for each tool result, and one for the texts and images between two of them."""
        parts: list[str | StoredImage] = [content] if isinstance(content, str) else []
        for block, kind, at in (
            [] if parts else _blocks(content, where, kinds=("text", "tool_result"), with_images=True)
        ):
            if kind != "tool_result":
                parts.append(_part(block, at))
                continue
            self._add_parts(parts)
            parts, result = [], block.get("content")
            output = "" if result is None else _content_of(result, f"{at}.content")
            call_id = read_text(block, "tool_use_id", at)
            self.messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
        self._add_parts(parts)
        if not content and not parts:
            raise wrong_type(where, content, expected="a string, or a list with at least one content block")

    def _add_parts(self, parts: Sequence[str | StoredImage]) -> None:
        if parts:
            self.messages.append({"role": "user", "content": joined(parts)})

    def _add_turn(self, content: Any, where: str) -> None:
        turn, self.last_name = Turn(), None
        if isinstance(content, str):
            turn.texts.append(content)
        else:
            for block, kind, at in _blocks(content, where, kinds=tuple(_TURN_BLOCKS)):
                _TURN_BLOCKS[kind](self, turn, block, at)
        self.messages.append(turn.message)

    def _add_text(self, turn: Turn, block: Block, where: str) -> None:
        turn.texts.append(read_text(block, "text", where))

    def _add_thinking(self, turn: Turn, block: Block, where: str) -> None:
        text, name = read_text(block, "thinking", where), block.get("signature")
        if name is not None:
            self.last_name = read_text(block, "signature", where)
        if not text and (answer := self._recorded.find(self.last_name, "reasoning")):
            text = answer.message.get("reasoning_content") or ""  # some clients keep only the signature
        turn.reasoning.append(text)

    def _add_call(self, turn: Turn, block: Block, where: str) -> None:
        value = checked(block.get("input"), dict, f"{where}.input", expected="an object")
        call_id, name = read_text(block, "id", where), read_text(block, "name", where)
        turn.add_call(function_call(call_id, name, json.dumps(value, ensure_ascii=False)), f"{where}.input")


_TURN_BLOCKS: Mapping[str, Callable[[Transcript, Turn, Block, str], None]] = {
    "text": Transcript._add_text,
    "thinking": Transcript._add_thinking,
    "tool_use": Transcript._add_call,
}


def _text_of(value: Any, where: str) -> str:
    """Return the text of a string or of a list of text blocks."""
    if isinstance(value, str):
        return value
    return "".join(read_text(block, "text", at) for block, _, at in _blocks(value, where, kinds=("text",)))


def _content_of(value: Any, where: str) -> Content:
    """Return the content of a string or of a list of blocks of text and images."""
    if isinstance(value, str):
        return value
    return joined([_part(block, at) for block, _, at in _blocks(value, where, kinds=("text",), with_images=True)])


def _part(block: Block, where: str) -> str | StoredImage:
    return block if isinstance(block, StoredImage) else read_text(block, "text", where)


def _blocks(value: Any, where: str, *, kinds: Sequence[str], with_images: bool = False) -> list[tuple[Block, str, str]]:
    """Return the content blocks with their types and places. Raises `ApiError` (400) for other types."""
    blocks = []
    for index, block in enumerate(checked(value, list, where, expected="a string or a list of content blocks")):
        at = f"{where}[{index}]"
        kind = part_type(block, at, expected="a content block, an object with a type")
        if kind not in kinds and not (with_images and isinstance(block, StoredImage)):
            raise unread_part(kind, f"{at}.type", kinds=kinds, noun="blocks")
        blocks.append((block, kind, at))
    return blocks


def _as_in_chat(choice: Mapping[str, Any]) -> Any:
    """Return a tool choice in the words of chat completions."""
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "name": choice.get("name")}
    return "required" if kind == "any" else kind


def _check_thinking(value: Any) -> None:
    thinking = {} if value is None else checked(value, dict, "thinking", expected="an object with a type")
    if thinking.get("type") not in (None, "adaptive"):
        raise not_supported(
            "thinking",
            why=f"found {quoted(thinking['type'])}, expected 'adaptive': the model reasons as its chat template says, "
            "without a budget; leave it out",
        )


def _check_output(value: Any) -> None:
    for name, setting in ({} if value is None else checked(value, dict, "output_config", expected="an object")).items():
        if setting is not None:
            raise not_supported(f"output_config.{name[:32]}", why="training needs unmodified samples; leave it out")


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
        "content": _content(reply),
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


def _content(reply: Reply) -> list[dict[str, Any]]:
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
        value = with_null(json.loads(function["arguments"]))
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": value})
    return blocks


MESSAGES = Dialect(
    path="/messages",
    read=read_message_request,
    body=message_body,
    events=message_events,
    error=message_error,
)
