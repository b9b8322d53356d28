"""Messages and tools in the form of chat completions, checked and reduced to the keys that a chat template may see.

It is also the inner form, which the other dialects translate to.

A template can read any key of a message. Unknown keys are dropped, so that a client cannot steer the rendering through
them. Images are in the store already (`integrations/gateway/images.py`). Not covered: audio, files, and the `function`
role that tools replaced.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.integrations.gateway.errors import ApiError, checked, not_supported, quoted, wrong_type
from lockstep.rollout.records import Message
from lockstep.rollout.replies import MAX_DEPTH, depth_of

ID_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
"""Token evidence that harnesses send back on assistant messages. The gateway's messages have the last two.

Other servers also put the ids of the prompt on every message: a conversation of n turns then has n²/2 of them.
"""

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = 2**15
MAX_TOOLS = 1024
MAX_CALLS = 1024
"""Most calls of one message. A request of millions of small parts would take the event loop's time."""
IMAGE_PARTS = ("image", "image_url", "input_image")
"""Types of the parts that are images, in all APIs."""
_IMAGE_ROLES = ("user", "tool")
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_EMPTY_FIELDS = ("function_call", "audio", "refusal")
"""Keys that client libraries send with null. Their values cannot be rendered."""


class StoredImage(dict[str, str]):
    """Part of a message that is an image, by its digest. It replaces a part of a client, which cannot make one."""


Content = str | list[Mapping[str, Any]]
"""Content of a message: a text, or parts if there are images."""


def read_tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    """Check the tools of a request. Raises `ApiError` (400) with the tool and the field."""
    tools = [] if value is None else checked(value, list, "tools", expected="a list of tools")
    refuse_many(tools, MAX_TOOLS, "tools")
    return tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools))


def refuse_many(parts: Sequence[Any], limit: int, where: str) -> None:
    if len(parts) > limit:
        raise ApiError(f"{where} has {len(parts)} entries, at most {limit} are allowed", param=where)


def read_last_ids(messages: Sequence[Any]) -> tuple[int, ...] | None:
    """Return the sampled ids on the last assistant message; None without them. Raises `ApiError` (400)."""
    for index in range(len(messages) - 1, -1, -1):
        message = messages[index]
        if message["role"] == "assistant":
            field = "generation_token_ids"
            return None if message.get(field) is None else _ids(message[field], f"messages[{index}].{field}")
    return None


def forget_ids(messages: Any) -> None:
    """Delete the token evidence of the messages, except for the ids of the last assistant message.

    Nothing else is read, and a long conversation has more numbers than text.
    """
    unread: tuple[str, ...] = ("prompt_token_ids", "generation_log_probs")
    for message in reversed(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict) and message.get("role") == "assistant":
            for field in unread:
                message.pop(field, None)
            unread = ID_FIELDS


def read_message(value: Any, where: str) -> Message:
    """Check a message of a request and leave out its token ids. Raises `ApiError` (400) with the field."""
    message = checked(value, dict, where, expected="an object with role and content")
    role = message.get("role")
    if role not in ROLES:
        raise wrong_type(f"{where}.role", role, expected=f"one of {', '.join(ROLES)}")
    for field in _EMPTY_FIELDS:
        if message.get(field) is not None:
            raise not_supported(f"{where}.{field}", why="only text and tool calls can be rendered; send null")
    content = "" if role == "assistant" and message.get("content") is None else _content(message.get("content"), where)
    if not isinstance(content, str) and role not in _IMAGE_ROLES:
        raise unread_part("image", f"{where}.content", kinds=("text",))
    # Chat templates do not know the developer role, the newer name of system; some drop such a message silently.
    copy: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": content}
    if message.get("name") is not None:
        copy["name"] = read_text(message, "name", where)
    if role == "tool":
        copy["tool_call_id"] = read_text(message, "tool_call_id", where)
    if role == "assistant":
        _add_assistant_fields(copy, message, where)
    elif any(message.get(field) is not None for field in ID_FIELDS):
        raise ApiError(f"{where} has token ids, but its role is {role}; only sampled messages have ids", param=where)
    return copy


def _add_assistant_fields(copy: dict[str, Any], message: Mapping[str, Any], where: str) -> None:
    # vLLM writes `reasoning`, others `reasoning_content`; a harness may send either.
    field = "reasoning_content" if message.get("reasoning_content") is not None else "reasoning"
    if message.get(field) is not None:
        copy["reasoning_content"] = read_text(message, field, where)
    calls = message.get("tool_calls")
    if calls is not None and checked(calls, list, f"{where}.tool_calls", expected="a list of tool calls"):
        refuse_many(calls, MAX_CALLS, f"{where}.tool_calls")
        copy["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]


def _content(value: Any, where: str) -> Content:
    if isinstance(value, str):
        return value
    parts = checked(value, list, f"{where}.content", expected="a string or a list of text parts")
    return joined([_part(part, f"{where}.content[{index}]") for index, part in enumerate(parts)])


def _part(part: Any, where: str) -> str | StoredImage:
    if isinstance(part, StoredImage):
        return part
    kind = part_type(part, where, expected='{"type": "text", "text": ...}')
    if kind != "text":
        raise unread_part(kind, f"{where}.type", kinds=("text",))
    return read_text(part, "text", where)


def joined(parts: Sequence[str | StoredImage]) -> Content:
    """Return the content of a message with these texts and images; texts beside each other are one."""
    if all(isinstance(part, str) for part in parts):
        return "".join(map(str, parts))
    content: list[Any] = []
    for kind, group in itertools.groupby(parts, key=type):
        some = list(group)
        content += [{"type": "text", "text": "".join(map(str, some))}] if kind is str else some
    return content


def part_type(part: Any, where: str, *, expected: str) -> Any:
    """Return the type of a part of a message. Raises `ApiError` (400) for a part that is not an object."""
    return part["type"] if isinstance(part, StoredImage) else checked(part, dict, where, expected=expected).get("type")


def unread_part(kind: object, where: str, *, kinds: Sequence[str], noun: str = "parts") -> ApiError:
    """Return the error for a part of a kind that cannot be in its place."""
    image = "; images are read in messages of the user and in tool results, with model.images.max_per_prompt above 0"
    return not_supported(
        where,
        why=f"found {quoted(kind)}; this model reads {' and '.join(kinds)} {noun} only here"
        + (image if kind in IMAGE_PARTS else ""),
    )


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        raise wrong_type(where, call, expected="an object with id, type and function")
    if call.get("type", "function") != "function":
        raise not_supported(f"{where}.type", why=f"found {quoted(call['type'])}, expected 'function'")
    function = call["function"]
    arguments = read_text(function, "arguments", f"{where}.function")
    refuse_deep(arguments, f"{where}.function.arguments")
    call_id, name = read_text(call, "id", where), read_text(function, "name", f"{where}.function")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool(tool: Any, where: str) -> Mapping[str, Any]:
    checked(tool, dict, where, expected='{"type": "function", "function": {...}}')
    if tool.get("type") != "function":
        raise not_supported(f"{where}.type", why=f"found {quoted(tool.get('type'))}, expected 'function'")
    function = checked(tool.get("function"), dict, f"{where}.function", expected="an object with a name")
    return {"type": "function", "function": read_function(function, f"{where}.function")}


def read_function(function: Mapping[str, Any], where: str, *, schema: str = "parameters") -> Mapping[str, Any]:
    """Check the name, the description and the JSON schema of a tool; return it, with an empty schema if it has none.

    schema: the field that holds the schema. Raises `ApiError` (400).
    """
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise wrong_type(f"{where}.name", name, expected="1 to 64 letters, digits, underscores or dashes")
    if function.get("description") is not None:
        read_text(function, "description", where)
    if function.get(schema) is None:  # a tool without parameters; templates read the key unconditionally
        function = {**function, schema: {"type": "object", "properties": {}}}
    checked(function[schema], dict, f"{where}.{schema}", expected="a JSON schema")
    return function


def refuse_deep(arguments: str, where: str) -> None:
    """Limit the nesting of arguments, which templates and JSON writers read by recursion.

    They are JSON in a string, which the depth check of the request does not reach.
    """
    try:
        depth = depth_of(json.loads(arguments))
    except RecursionError:
        depth = MAX_DEPTH + 1
    except ValueError:  # not JSON: shown to the model as written
        return
    if depth > MAX_DEPTH:
        raise ApiError(f"{where} is nested more than {MAX_DEPTH} levels deep", param=where)


def read_text(parent: Mapping[str, Any], field: str, where: str) -> str:
    return checked(parent.get(field), str, f"{where}.{field}", expected="a string")


def _ids(value: Any, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise wrong_type(where, value, expected="the list of ids that the gateway sent, unchanged")
    return tuple(value)
