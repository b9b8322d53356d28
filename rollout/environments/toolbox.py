"""Python functions as tools: schemas from their signatures, and calls that never raise.

Each fault of a call (`ToolFault`) becomes a tool message that explains it, and a count. These messages are part of
prompts: changing one changes what is sampled. Tools run in this process, with its rights, and are not contained
(`rollout/system/deadline.py`): they must not run model-written code.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from lockstep.rollout.chat.tool_functions import BadArgumentsError, Content, describe
from lockstep.rollout.errors import ConfigError, TemplateError, ToolServerError
from lockstep.rollout.records import Message, Rollout, content_text, is_image_part
from lockstep.rollout.replies import read_json
from lockstep.rollout.safe_text import error_text
from lockstep.rollout.system.deadline import DeadlineExceeded, Finished, TooManyAbandoned, call_with_deadline
from lockstep.rollout.system.user_functions import load_functions

MAX_ERROR_CHARS = 500
"""Length of an error in a tool message. An exception's text may hold a whole document."""

MAX_CALLS = 128
"""Most calls of one turn that are run. A model that repeats itself writes thousands: a thread and a message each."""

ToolFunction = Callable[..., Any]


class ToolFault(StrEnum):
    """Reason why a tool call has no result."""

    MALFORMED = "malformed"
    """The call is not valid JSON, or not an object with a name and arguments."""
    UNKNOWN_TOOL = "unknown_tool"
    """No tool has this name."""
    BAD_ARGUMENTS = "bad_arguments"
    """Arguments are missing, unknown or of the wrong type."""
    EXCEPTION = "exception"
    """The function raised, or its result cannot be written as text."""
    TIMEOUT = "timeout"
    """The function did not return in time; a sync one may still be running."""
    SERVER = "server"
    """The server of the tool is gone, or its answer cannot be used."""
    TOO_MANY = "too_many"
    """The turn has more than `MAX_CALLS` calls; one result for all further ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyTool:
    """A tool with its schema, in place of a Python function that is described by its signature."""

    schema: Mapping[str, Any]
    """In the OpenAI form."""
    call: Callable[[Mapping[str, Any]], Awaitable[Content]]
    """Function of the arguments. Raises `BadArgumentsError` for those that its schema refuses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """Answer to one call, as the model sees it."""

    name: str
    call_id: str
    content: Content
    fault: ToolFault | None = None

    @property
    def message(self) -> Message:
        return {"role": "tool", "name": self.name, "tool_call_id": self.call_id, "content": self.content}


class Toolbox:
    """Tools of an episode."""

    def __init__(
        self,
        functions: Sequence[ToolFunction],
        *,
        files: Sequence[str] = (),
        ready: Sequence[ReadyTool] = (),
        timeout_s: float = 10.0,
        max_result_chars: int = 8192,
    ):
        """Raises `ConfigError` if a function cannot be loaded or be a tool, or if two have the same name.

        files: more functions, as `path/to/file.py:name,other`. The files run with all the rights of this process: name
        only files that you would run yourself.
        ready: tools that are described already. timeout_s: wall-clock limit of each call.
        max_result_chars: longer results are cut, with a note that says so.
        """
        if isinstance(files, str):
            raise ConfigError(f"environment.settings.files: found {files}, expected a list; write [{files}]")
        functions = [*functions, *itertools.chain(*map(load_functions, files))]
        # Methods are described once for their class, not for every episode's instance.
        signatures = [describe(function.__func__ if inspect.ismethod(function) else function) for function in functions]
        self.schemas = [*(signature.schema for signature in signatures), *(tool.schema for tool in ready)]
        """In the OpenAI form: {"type": "function", "function": {"name", "description", "parameters"}}."""
        names = [schema["function"]["name"] for schema in self.schemas]
        for name, count in Counter(names).items():
            if count > 1:
                raise ConfigError(f"{count} tools are named {name!r}; rename all but one of the functions")
        calls = [signature.bind(function) for signature, function in zip(signatures, functions, strict=True)]
        self._functions = dict(zip(names, [*calls, *(_by_keyword(tool.call) for tool in ready)], strict=True))
        self._arguments = dict(zip(names, (json.dumps(one.arguments) for one in signatures), strict=False))
        """Schemas of the functions' arguments as JSON. Ready tools check theirs."""
        self._timeout_s = timeout_s
        self._max_result_chars = max_result_chars

    async def answer(self, message: Message, *, sees_images: bool = True) -> list[ToolResult]:
        """Run all tool calls of an assistant message at the same time; return results in the order of the calls.

        Malformed calls (`tool_call_errors`) are answered after them, and calls beyond `MAX_CALLS` by one result. Empty
        if the message calls no tool. Never raises, whatever the message holds. sees_images: False answers a call that
        returns an image with an error.
        """
        calls, errors = message.get("tool_calls") or (), message.get("tool_call_errors") or ()
        results = await asyncio.gather(*(self._call(call, sees_images) for call in calls[:MAX_CALLS]))
        unread = [
            ToolResult(
                name="tool_call",
                call_id=f"unread_{number}",
                content=_error_text(f"the tool call could not be read: {error}"),
                fault=ToolFault.MALFORMED,
            )
            for number, error in enumerate(errors[: MAX_CALLS - len(results)])
        ]
        all_results = [*results, *unread]
        num_left = len(calls) + len(errors) - len(all_results)
        if num_left:
            text = f"{num_left} further tool calls were not run; a turn may have {MAX_CALLS}"
            further = ToolResult(
                name="tool_call", call_id="further", content=_error_text(text), fault=ToolFault.TOO_MANY
            )
            all_results.append(further)
        return all_results

    async def _call(self, call: Mapping[str, Any], sees_images: bool) -> ToolResult:
        name = str(call["function"]["name"])
        content, fault = await self._run(name, call["function"].get("arguments"))
        if not isinstance(content, str) and (problem := _images_problem(content, sees_images)):
            content, fault = _error_text(f"{name}: {problem}"), ToolFault.EXCEPTION
        return ToolResult(name=name, call_id=str(call.get("id", "")), content=content, fault=fault)

    async def _run(self, name: str, raw_arguments: Any) -> tuple[Content, ToolFault | None]:
        if name not in self._functions:
            tool_names = ", ".join(self._functions) or "none"
            return _error_text(f"there is no tool {name!r}; tools: {tool_names}"), ToolFault.UNKNOWN_TOOL
        try:
            arguments = _read_arguments(raw_arguments)
        except ValueError as error:
            return _error_text(f"the arguments of {name} are not a JSON object: {error}"), ToolFault.MALFORMED
        tool = functools.partial(self._functions[name], **arguments)  # an argument may be called timeout_s
        result = Finished()
        if name in self._arguments:
            from lockstep.rollout.hosts.foreign_schemas import refuse_wrong  # runs without tools load no host

            check = functools.partial(refuse_wrong, self._arguments[name], arguments, is_own=True)
            result = await call_with_deadline(check, timeout_s=self._timeout_s)
        if result.error is None:
            result = await call_with_deadline(tool, timeout_s=self._timeout_s)
        if isinstance(result.error, DeadlineExceeded | TooManyAbandoned):
            return _error_text(f"{name} timed out: {result.error}"), ToolFault.TIMEOUT
        if isinstance(result.error, BadArgumentsError):
            return _error_text(f"wrong arguments for {name}{result.error}"), ToolFault.BAD_ARGUMENTS
        if isinstance(result.error, ToolServerError):
            return _error_text(f"{name}: {result.error}"), ToolFault.SERVER
        if result.error is not None:
            return _exception_text(result.error), ToolFault.EXCEPTION
        return self._cut(result.value), None

    def _cut(self, content: Content) -> Content:
        if not isinstance(content, str):
            return [part | {"text": self._cut(part["text"])} if "text" in part else part for part in content]
        text = _printable(content)
        if len(text) <= self._max_result_chars:
            return text
        return f"{text[: self._max_result_chars]}\n[cut: {len(text)} characters, {self._max_result_chars} shown]"


def count_results(results: Sequence[ToolResult]) -> dict[str, int]:
    """Count calls for an episode's outcome: tool_calls, tool_errors, and tool_errors_<fault> for each fault seen."""
    faults = [result.fault for result in results if result.fault is not None]
    return {
        "tool_calls": len(results),
        "tool_errors": len(faults),
        **{f"tool_errors_{fault}": count for fault, count in Counter(faults).items()},
    }


def failed_call(rollouts: Iterable[Rollout]) -> str | None:
    """Return the answer to a tool call that failed, an exception of a tool rather than a mistake of the model.

    It is the first of a rollout whose calls all failed, so that no result of a tool is taken for one; None without.
    """

    def count(rollout: Rollout, name: str) -> float:
        value = rollout.outcome.get(name)  # another environment may report something else under the name
        return value if isinstance(value, int | float) else 0

    failed = (one for one in rollouts if 0 < count(one, "tool_errors") == count(one, "tool_calls"))
    by_exceptions = sorted(failed, key=lambda one: -count(one, f"tool_errors_{ToolFault.EXCEPTION}"))
    answers = (message for one in by_exceptions for message in one.messages if message["role"] == "tool")
    return next((content_text(message) for message in answers), None)


def _by_keyword(call: Callable[[Mapping[str, Any]], Awaitable[Content]]) -> ToolFunction:
    async def by_keyword(**arguments: Any) -> Content:
        return await call(arguments)

    return by_keyword


def _read_arguments(raw: Any) -> dict[str, Any]:
    """Return the arguments as a mapping; they come parsed, as JSON text, or empty for a tool without arguments."""
    if isinstance(raw, Mapping):
        return dict(raw)
    if raw is None or raw == "":
        return {}
    value = read_json(raw) if isinstance(raw, str) else raw
    if not isinstance(value, dict):
        raise ValueError(f"found {type(value).__name__}")
    return value


def _images_problem(content: Sequence[Mapping[str, Any]], sees_images: bool) -> str | None:
    """Return why the images of a result cannot be read; None if they can."""
    if not sees_images:
        return "it returned an image, which the model does not see"
    from lockstep.rollout.media.image_files import read_image  # tools without images do not load it

    try:
        for part in content:
            if is_image_part(part):
                read_image(part, "the result")
    except TemplateError as error:
        return str(error)
    return None


def _error_text(text: str) -> str:
    return _printable(f"error: {text}"[:MAX_ERROR_CHARS])


def _exception_text(error: BaseException) -> str:
    return _error_text(f"{type(error).__name__}: {error_text(error)}")


def _printable(text: str) -> str:
    """Replace lone surrogates, which cannot be encoded and would fail in a tokenizer."""
    return text.encode("utf-8", "replace").decode("utf-8")
