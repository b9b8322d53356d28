"""Messages and tools of a request, checked, and reduced to what a chat template may see.

A template can read any key of a message, so keys that are not known here do not pass: a client cannot steer the
rendering through them. Text stays text (`rollout/chat/untrusted.py` sees to special tokens spelled out in it).

Not covered: images, audio, files, and the `function` role that tools replaced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rollout.chat.tool_calls import MAX_DEPTH
from rollout.gateway.errors import ApiError, not_supported, wrong_type
from rollout.records import Message

ID_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
"""Token evidence on assistant messages: put there by the gateway, sent back by harnesses that echo messages."""

ROLES = ("system", "developer", "user", "assistant", "tool")
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_EMPTY_FIELDS = ("function_call", "audio", "refusal")
"""Keys that client libraries send with null; with a value they would mean something that cannot be rendered."""


def read_messages(value: Any) -> tuple[Message, ...]:
    """Raises `ApiError` (400) that names the message and the field."""
    if not isinstance(value, list) or not value:
        raise wrong_type("messages", value, expected="a list with at least one message")
    return tuple(_message(message, f"messages[{index}]") for index, message in enumerate(value))


def read_tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    """Raises `ApiError` (400) that names the tool and the field."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise wrong_type("tools", value, expected="a list of tools")
    return tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(value))


def without_ids(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages as people and rewards read them."""
    return tuple({key: item for key, item in message.items() if key not in ID_FIELDS} for message in messages)


def depth_of(value: object) -> int:
    """Levels of nesting of a JSON value, counted without recursion."""
    depth, level = 0, [value]
    while level:
        depth += 1
        containers = [item for item in level if isinstance(item, (dict, list))]
        level = [item for c in containers for item in (c.values() if isinstance(c, dict) else c)]
    return depth


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise wrong_type(where, message, expected="an object with role and content")
    role = message.get("role")
    if role not in ROLES:
        raise wrong_type(f"{where}.role", role, expected=f"one of {', '.join(ROLES)}")
    for field in _EMPTY_FIELDS:
        if message.get(field) is not None:
            raise not_supported(f"{where}.{field}", why="only text and tool calls can be rendered; send null")
    content = _content(message.get("content"), f"{where}.content", may_be_null=role == "assistant")
    # Chat templates know no developer role (some drop such a turn without a word); it is the system's newer name.
    copy: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": content}
    if message.get("name") is not None:
        copy["name"] = _text(message["name"], f"{where}.name")
    if role == "tool":
        copy["tool_call_id"] = _text(message.get("tool_call_id"), f"{where}.tool_call_id")
    if role == "assistant":
        _add_assistant_fields(copy, message, where)
    elif any(message.get(field) is not None for field in ID_FIELDS):
        raise ApiError(
            f"{where} has token ids, but its role is {role}; only what the model sampled has ids", param=where
        )
    return copy


def _add_assistant_fields(copy: dict[str, Any], message: Mapping[str, Any], where: str) -> None:
    # vLLM writes `reasoning`, others `reasoning_content`; a harness may have learned either.
    field = "reasoning_content" if message.get("reasoning_content") is not None else "reasoning"
    if message.get(field) is not None:
        copy["reasoning_content"] = _text(message[field], f"{where}.{field}")
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise wrong_type(f"{where}.tool_calls", calls, expected="a list of tool calls")
    if calls:
        copy["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    for field in ID_FIELDS:
        if message.get(field) is not None:
            copy[field] = _numbers(message[field], f"{where}.{field}", integers=field != "generation_log_probs")


def _content(value: Any, where: str, *, may_be_null: bool) -> str:
    if isinstance(value, str):
        return value
    if value is None and may_be_null:
        return ""
    if isinstance(value, list):
        return "".join(_text_part(part, f"{where}[{index}]") for index, part in enumerate(value))
    raise wrong_type(where, value, expected="a string or a list of text parts")


def _text_part(part: Any, where: str) -> str:
    if not isinstance(part, dict):
        raise wrong_type(where, part, expected='{"type": "text", "text": ...}')
    if part.get("type") != "text":
        raise not_supported(f"{where}.type", why=f"found {part.get('type')!r}; this model reads text parts only")
    return _text(part.get("text"), f"{where}.text")


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        raise wrong_type(where, call, expected="an object with id, type and function")
    if call.get("type", "function") != "function":
        raise not_supported(f"{where}.type", why=f"found {call['type']!r}, expected 'function'")
    function = call["function"]
    arguments = _text(function.get("arguments"), f"{where}.function.arguments")
    _refuse_deep(arguments, f"{where}.function.arguments")
    return {
        "id": _text(call.get("id"), f"{where}.id"),
        "type": "function",
        "function": {"name": _text(function.get("name"), f"{where}.function.name"), "arguments": arguments},
    }


def _tool(tool: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(tool, dict):
        raise wrong_type(where, tool, expected='{"type": "function", "function": {...}}')
    if tool.get("type") != "function":
        raise not_supported(f"{where}.type", why=f"found {tool.get('type')!r}, expected 'function'")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise wrong_type(f"{where}.function", function, expected="an object with a name")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise wrong_type(f"{where}.function.name", name, expected="1 to 64 letters, digits, underscores or dashes")
    if not isinstance(function.get("description", ""), str | None):
        raise wrong_type(f"{where}.function.description", function["description"], expected="a string")
    parameters = function.get("parameters")
    if parameters is None:  # a tool without parameters; templates read the key without asking
        function = {**function, "parameters": {"type": "object", "properties": {}}}
    elif not isinstance(parameters, dict):
        raise wrong_type(f"{where}.function.parameters", parameters, expected="a JSON schema")
    return {"type": "function", "function": function}


def _refuse_deep(arguments: str, where: str) -> None:
    """Templates and JSON writers recurse; arguments come as a string, past the depth check of the request."""
    try:
        depth = depth_of(json.loads(arguments))
    except RecursionError:
        depth = MAX_DEPTH + 1
    except ValueError:  # shown to the model as it was written
        return
    if depth > MAX_DEPTH:
        raise ApiError(f"{where} is nested more than {MAX_DEPTH} levels deep", param=where)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise wrong_type(where, value, expected="a string")
    return value


def _numbers(value: Any, where: str, *, integers: bool) -> list[Any]:
    allowed = (int,) if integers else (int, float)
    if not isinstance(value, list) or not all(type(item) in allowed for item in value):
        raise wrong_type(where, value, expected="the list of numbers that the gateway sent, unchanged")
    return value
