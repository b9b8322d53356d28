"""Parser of sampled text into an assistant message: reasoning, content and tool calls.

A model can write anything, so nothing here raises. Text that cannot be parsed as a tool call stays in the content, and
a sentence in `tool_call_errors` says what is wrong with it, so that an environment can tell the model. These sentences
are part of prompts: changing one changes what is sampled.

    hermes   <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them (ChatML, Qwen)
    llama3   {"name": ..., "parameters": {...}}, several separated by ";", optionally after <|python_tag|>

Not covered: XML-style arguments (Qwen3-Coder) and Python-style call lists (Llama 3.2 and 4).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.rollout.replies import MAX_DEPTH, depth_of

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
TOOL_CALL_OPEN, TOOL_CALL_CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
HARMONY_STOPS = ("<|return|>", "<|call|>")
"""Tokens that end a turn of gpt-oss. `<|end|>` closes a message, and a turn may hold several (analysis, then final)."""

_HERMES_CALL = re.compile(rf"{TOOL_CALL_OPEN}(.*?)(?:{TOOL_CALL_CLOSE}|(?={TOOL_CALL_OPEN})|\Z)", re.DOTALL)

_LLAMA3_SEPARATOR = re.compile(r"[; \n\t]+")

_THINK_TAG = re.compile(f"{THINK_OPEN}|{THINK_CLOSE}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    name: str
    arguments: str
    """A JSON object, as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Parts of an assistant turn."""

    content: str
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = ()
    errors: tuple[str, ...] = ()
    """One sentence per malformed call; its text is still in `content`."""
    is_broken_after_call: bool = False
    """True if a well-formed call comes first and the rest makes the whole turn malformed (Llama 3)."""
    ends_in_reasoning: bool = False
    """True if the reasoning was never closed, or nothing follows it in a format that ends turns by an answer."""

    def message(self, sampled_ids: Sequence[int], *, prompt_ids: Sequence[int] = ()) -> dict[str, Any]:
        """Return the turn as an OpenAI message: role and content, and further keys that have a value.

        The ids of its tool calls depend on all token ids given, so that equal calls in two turns have other ids.
        """
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call_id, call in zip(_call_ids(sampled_ids, prompt_ids), self.calls, strict=False)
            ]
        if self.errors:
            message["tool_call_errors"] = list(self.errors)
        return message


def split_reasoning(text: str, *, is_open: bool = False) -> tuple[str | None, str]:
    """Split a text into the reasoning of its first think block, or None, and the rest.

    A block that is never closed is all reasoning. A close without an open ends a block that began with the text.
    Think tags inside tool calls are arguments.
    is_open: True if the prompt ended inside a think block, so that the text starts in one.
    """
    tags = _without_tags_in_calls(text, is_open=is_open)
    close = tags.find(THINK_CLOSE)
    has_close_tag = close >= 0
    head, rest = (text[:close], text[close + len(THINK_CLOSE) :]) if has_close_tag else (text, "")
    start = tags.find(THINK_OPEN, 0, len(head))
    has_open_tag = start >= 0
    before, inside = (head[:start], head[start + len(THINK_OPEN) :]) if has_open_tag else (head, "")
    if has_close_tag:
        reasoning = inside if has_open_tag else before
        outside = before.strip() if has_open_tag else ""
        return reasoning.strip("\n"), outside + rest.lstrip("\n")
    if has_open_tag and not before.strip():
        return inside.strip("\n"), ""
    if is_open:
        return text.strip("\n"), ""
    return None, text


def _without_tags_in_calls(text: str, *, is_open: bool) -> str:
    """Return the text, of the same length, without the think tags inside tool calls.

    Inside a think block only well-formed calls count: a model may write about calls there.
    """
    parts = []
    end = 0
    for match in _HERMES_CALL.finditer(text):
        before = text[end : match.start()]
        is_open = is_open or THINK_OPEN in before
        is_argument = not is_open or isinstance(_read_call(match[1], arguments_keys=("arguments",)), ToolCall)
        parts += before, _THINK_TAG.sub(lambda tag: " " * len(tag[0]), match[0]) if is_argument else match[0]
        end = match.end()
    return "".join([*parts, text[end:]])


def _is_closed(text: str, *, is_open: bool) -> bool:
    return THINK_CLOSE in _without_tags_in_calls(text, is_open=is_open)


def parse_hermes(text: str, *, reasoning_is_open: bool = False) -> Turn:
    reasoning, content = split_reasoning(text, is_open=reasoning_is_open)
    is_cut = reasoning is not None and not _is_closed(text, is_open=reasoning_is_open)
    calls: list[ToolCall] = []
    errors: list[str] = []

    def read(match: re.Match[str]) -> str:
        result = (
            _read_call(match[1], arguments_keys=("arguments",))
            if match[0].endswith(TOOL_CALL_CLOSE)
            else f"a tool call was opened with {TOOL_CALL_OPEN} and never closed with {TOOL_CALL_CLOSE}"
        )
        if isinstance(result, ToolCall):
            calls.append(result)
            return ""
        errors.append(result)
        return match[0]

    remaining = _HERMES_CALL.sub(read, content)
    if calls:
        remaining = remaining.strip("\n")
    return Turn(
        content=remaining, reasoning=reasoning, calls=tuple(calls), errors=tuple(errors), ends_in_reasoning=is_cut
    )


def parse_llama3(text: str, *, tool_names: Collection[str] = (), reasoning_is_open: bool = False) -> Turn:
    """Parse Llama 3 calls. Without <|python_tag|>, a turn that is JSON counts as a call only where tools were offered,
    since a model also answers in JSON when it is asked for JSON."""
    reasoning, content = None, text
    if reasoning_is_open or not _is_llama3_call(text, tool_names):  # think tags inside a call are arguments
        reasoning, content = split_reasoning(text, is_open=reasoning_is_open)
    if not _is_llama3_call(content, tool_names):
        is_cut = reasoning is not None and not _is_closed(text, is_open=reasoning_is_open)
        return Turn(content=content, reasoning=reasoning, ends_in_reasoning=is_cut)
    body = content.strip().removeprefix(PYTHON_TAG).strip()
    calls: list[ToolCall] = []
    for part in _json_values(body):
        result = _read_call(part, arguments_keys=("parameters", "arguments"))
        if isinstance(result, str):
            return Turn(content=content, reasoning=reasoning, errors=(result,), is_broken_after_call=bool(calls))
        calls.append(result)
    return Turn(content="", reasoning=reasoning, calls=tuple(calls))


def _is_llama3_call(text: str, tool_names: Collection[str]) -> bool:
    body = text.strip()
    return body.startswith(PYTHON_TAG) or (bool(tool_names) and body.startswith("{"))


def _json_values(text: str) -> list[str]:
    """Split `{...}; {...}` into its values. The last part is the rest that is not JSON, if any."""
    decoder = json.JSONDecoder()
    parts = []
    start = 0
    while start < len(text):
        try:
            _, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            parts.append(text[start:])
            break
        parts.append(text[start:end])
        separator = _LLAMA3_SEPARATOR.match(text, end)
        start = end if separator is None else separator.end()
    return parts or [""]


def _read_call(text: str, *, arguments_keys: Sequence[str]) -> ToolCall | str:
    """Parse a call from JSON text; return a sentence on the mistake if it has one."""
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"a tool call is not valid JSON: {error}"
    except RecursionError:
        return "a tool call is not valid JSON: it is nested too deeply"
    if not isinstance(value, dict):
        return f"a tool call must be a JSON object with a name and arguments, found {_kind(value)}"
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return "a tool call must have a name that is a string"
    return read_arguments(name, next((value[key] for key in arguments_keys if key in value), {}))


def read_arguments(name: str, arguments: Any) -> ToolCall | str:
    """Make a call from arguments (an object, or its JSON text); return a sentence on the mistake if they have one."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return f"the arguments of the call to {name!r} are not valid JSON"
    if not isinstance(arguments, dict):
        return f"the arguments of the call to {name!r} must be a JSON object, found {_kind(arguments)}"
    if depth_of(arguments) > MAX_DEPTH:
        return f"the arguments of the call to {name!r} are nested more than {MAX_DEPTH} levels deep"
    arguments_json = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(name=without_surrogates(name), arguments=without_surrogates(arguments_json))


def without_surrogates(text: str) -> str:
    """Replace lone surrogates by U+FFFD: JSON escapes can contain them, and no tokenizer can encode them."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _kind(value: object) -> str:
    names = {list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number", dict: "an object"}
    return names.get(type(value), "null")


def _call_ids(sampled_ids: Sequence[int], prompt_ids: Sequence[int]) -> Iterator[str]:
    """Yield ids of calls, equal for equal turns: nine letters and digits, a form that every template accepts."""
    turn = (tuple(sampled_ids), hashlib.blake2b(array("q", prompt_ids).tobytes()).digest())
    shared = hashlib.blake2b(f"({turn!r}, ".encode(), digest_size=5)
    for index in itertools.count():
        digest = shared.copy()  # a hash of the whole turn for each call would take quadratic time
        digest.update(f"{index})".encode())
        yield digest.hexdigest()[:9]
