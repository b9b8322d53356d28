"""Chat messages in the one form that chat templates read."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lockstep.rollout.chat.tool_calls import without_surrogates
from lockstep.rollout.errors import TemplateError
from lockstep.rollout.records import Message, is_stored_image

Tools = Sequence[Mapping[str, Any]]
"""JSON schemas of tools in the OpenAI form, as chat templates render them."""

_ANNOTATIONS = frozenset(
    {
        *("tool_call_errors", "prompt_token_ids", "generation_token_ids", "generation_log_probs", "weight_versions"),
        "weight",
    }
)
"""Keys that Lockstep adds to messages for environments and harnesses, and the weight of a demonstrated turn. Templates
do not see them."""


def normalize_messages(messages: Sequence[Message], *, sees_images: bool = False) -> list[dict[str, Any]]:
    """Return copies of the messages in one form.

    Text parts are joined, missing content is "", tool-call arguments are objects (templates write them with `tojson`,
    which would quote a string twice), a tool result carries the name of its own tool (found by `tool_call_id`), and
    lone surrogates, which no tokenizer can encode, become U+FFFD. Raises `TemplateError`: a message has no role, or
    content that is not text.

    sees_images: content with images, given by their digests (`rollout/media/processing.py`), stays a list of its parts.
    """
    names: dict[str, str] = {}
    copies = []
    for index, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str):
            raise TemplateError(f"message {index} has role {role!r}; expected system, user, assistant or tool")
        copy = {key: value for key, value in message.items() if key not in _ANNOTATIONS}
        copy = map_text(copy, without_surrogates)
        copy["content"] = _content(copy.get("content"), index, sees_images=sees_images and role != "assistant")
        if copy.get("tool_calls"):
            copy["tool_calls"] = [_tool_call(call, index) for call in copy["tool_calls"]]
            names |= {call["id"]: call["function"]["name"] for call in copy["tool_calls"] if "id" in call}
        else:
            copy.pop("tool_calls", None)  # some templates only test for the key
        if role == "tool" and not copy.get("name") and copy.get("tool_call_id") in names:
            copy["name"] = names[copy["tool_call_id"]]
        copies.append(copy)
    return copies


def _content(content: Any, index: int, *, sees_images: bool) -> str | list[dict[str, str]]:
    if not (sees_images and isinstance(content, list) and any(map(is_stored_image, content))):
        return _text(content, index)
    return [
        {"type": "image", "digest": part["digest"]}
        if is_stored_image(part)
        else {"type": "text", "text": _text([part], index)}
        for part in content
    ]


def _text(content: Any, index: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if all(isinstance(text, str) for text in texts):
            return "".join(text for text in texts if text)
    raise TemplateError(
        f"message {index} has content of type {type(content).__name__}; expected a string, or a list of text parts "
        '({"type": "text", "text": ...}): images and audio are not supported'
    )


def _tool_call(call: Any, index: int) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise TemplateError(f"message {index} has a tool call without a function name: {call!r:.200}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # text that is not JSON is rendered as it is
            arguments = json.loads(arguments)
    arguments = map_text(arguments, without_surrogates)
    return {**call, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def map_text(value: Any, change: Callable[[str], str]) -> Any:
    """Return a deep copy, in lists and dicts, of a JSON-like value with all its strings changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {map_text(key, change): map_text(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [map_text(item, change) for item in value]
    return value
