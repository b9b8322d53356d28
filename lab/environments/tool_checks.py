"""Calls of every tool with arguments made from its schema: each must be answered in time, if only with an error."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from lockstep.lab.environments.subject import Answer, Subject
from lockstep.lab.environments.watched_environment import FaultKind
from lockstep.lab.finding import Finding, Verdict, failure
from lockstep.rollout.chat.messages import Tools
from lockstep.rollout.environments.toolbox import ToolFault
from lockstep.rollout.errors import TemplateError
from lockstep.rollout.records import Message, Rollout, content_text
from lockstep.rollout.safe_text import terminal_safe

MAX_TOOLS = 16
"""Tools that are called; an environment may have hundreds."""
MAX_SHOWN_CHARS = 60
SAMPLES: dict[str, Any] = {"string": "a", "integer": 1, "number": 1.0, "boolean": True, "null": None}
"""Arguments by their type in the schema."""
FORMATS = {"date": "2024-01-31", "date-time": "2024-01-31T12:00:00Z", "time": "12:00:00", "duration": "PT1M"} | {
    "uuid": "12345678-1234-5678-1234-567812345678"
}
"""Texts by their format in the schema."""


async def examine_tools(subject: Subject, tools: Tools) -> AsyncIterator[Finding]:
    """Call each tool once in an episode of the first row, and yield one finding for each."""
    for tool in tools[:MAX_TOOLS]:
        function = tool.get("function", tool)
        finding = await _call(subject, str(function["name"]), sample_of(function.get("parameters") or {}))
        if finding.verdict is Verdict.OK:  # and once more without arguments, which must be answered as well
            other = await _call(subject, str(function["name"]), {})
            finding = other if other.verdict is Verdict.FAILS else finding
        yield finding
    if len(tools) > MAX_TOOLS:
        yield Finding(check="tools", verdict=Verdict.NOTE, measured=f"{MAX_TOOLS} of {len(tools)} were called")


def sample_of(schema: Any) -> Any:
    """Return a value that a JSON schema of plain types allows."""
    if not isinstance(schema, Mapping):
        return "a"
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    if choices := schema.get("enum") or schema.get("examples"):
        return choices[0]
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return sample_of(schema[key][0])
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    if kind == "object" or (kind is None and "properties" in schema):
        properties = schema.get("properties") or {}
        return {name: sample_of(properties.get(name)) for name in schema.get("required", ())}
    if kind == "array":
        return [sample_of(item) for item in schema.get("prefixItems") or [schema.get("items")]]
    if kind in ("integer", "number"):
        return schema.get("minimum", SAMPLES[kind])
    return FORMATS.get(schema.get("format", ""), SAMPLES.get(str(kind), "a"))


async def _call(subject: Subject, name: str, arguments: Any) -> Finding:
    check = f"tool {name}"
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    turns: list[Answer] = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    has_called = False

    async def player(messages: Sequence[Message]) -> Answer:
        nonlocal has_called
        turn = "" if has_called else turns[0]
        has_called = True
        return turn

    num_faults = len(subject.watch.faults)
    try:
        rollout = await subject.play(subject.rows[0], player, may_hang=True)
    except TemplateError:  # the template writes calls in another form than it opens a turn
        turns[0] = f"<tool_call>\n{json.dumps(call['function'])}\n</tool_call>"
        has_called = False
        rollout = await subject.play(subject.rows[0], player, may_hang=True)
    faults = subject.watch.faults[num_faults:]
    limit = f"{subject.options.deadline_s:g} s"
    timed_out = rollout.outcome.get(f"tool_errors_{ToolFault.TIMEOUT}")
    if timed_out or any(fault.kind is FaultKind.HUNG for fault in faults):
        subject.hanging_tools.append(name)
    if any(fault.kind is FaultKind.HUNG for fault in faults):
        return failure(
            check, f"tool {name} did not answer in {limit}: {faults[0].place} {faults[0].text}.", "no answer"
        )
    if timed_out:
        sentence = (
            f"tool {name} never answered a call with {json.dumps(arguments)}: {_result(rollout)}. Give what it waits "
            "for a limit of its own; the thread of a tool that hangs stays until the run ends."
        )
        return failure(check, sentence, "no answer in time")
    if faults:
        return failure(check, f"after a call of tool {name}, {faults[0].place} {faults[0].text}.", "no answer")
    return Finding(check=check, measured=terminal_safe(_result(rollout))[:MAX_SHOWN_CHARS])


def _result(rollout: Rollout) -> str:
    for message in rollout.completion:
        if message["role"] == "tool":
            return content_text(message) or "(empty)"
    return "no tool message"
