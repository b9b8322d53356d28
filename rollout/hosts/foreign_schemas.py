"""Tools that a server describes: their form, size and schemas, checked when they are listed, and arguments for them.

Schemas are checked in a host (`rollout/hosts/tool_schemas.py`), which is killed after `CHECK_S`.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakSet

from lockstep.rollout.chat.tool_calls import without_surrogates
from lockstep.rollout.chat.tool_functions import BadArgumentsError
from lockstep.rollout.errors import EnvironmentFault, ToolServerError
from lockstep.rollout.hosts.process import Host, host
from lockstep.rollout.hosts.tool_schemas import arguments_problem
from lockstep.rollout.replies import read_json

PROGRAM = Path(__file__).with_name("tool_schemas.py")
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MAX_TOOLS = 256
"""Tools that a server may list: each is part of every prompt."""
MAX_CHARS = 2**18
"""Length of a list of tools as JSON, descriptions included."""
CHECK_S = 5.0
"""Time limit of one check [s]. One takes about a millisecond."""
START_S = 120.0
"""Time for the host to start [s]."""
ATTEMPTS = 3
"""Attempts of a check whose host was killed meanwhile, for the check of another."""
SLOW = ('"pattern', '"uniqueItems')
"""Keywords whose checks can take more than proportional time: a set of numbers and texts is compared in pairs."""
_sound: set[str] = set()
"""Schemas that were checked."""
_ready: WeakSet[Host] = WeakSet()


async def read_tools(listed: Sequence[tuple[Any, Any, Any]]) -> list[Mapping[str, Any]]:
    """Return tools in the OpenAI form. Raises `ToolServerError` with the reason why one cannot be offered.

    listed: name, description and schema of each.
    """
    if len(listed) > MAX_TOOLS:
        raise ToolServerError(f"it lists {len(listed)} tools, at most {MAX_TOOLS} fit")
    tools = []
    num_chars = 0
    for name, description, parameters in listed:
        label = f"tool {name!r:.80}"
        if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
            raise ToolServerError(f"{label} has a name that models cannot write; expected letters, digits, _, - and .")
        if not isinstance(parameters, Mapping) or parameters.get("type") != "object":
            kind = parameters.get("type") if isinstance(parameters, Mapping) else parameters
            raise ToolServerError(f"{label} takes {kind!r:.80}; expected arguments of type object")
        function = {"name": name, "description": str(description or ""), "parameters": parameters}
        try:
            text = without_surrogates(json.dumps({"type": "function", "function": function}, ensure_ascii=False))
            tools.append(read_json(text))
        except (TypeError, ValueError, RecursionError) as error:
            raise ToolServerError(f"{label} cannot be written as JSON ({error})") from error
        num_chars += len(text)
        if num_chars > MAX_CHARS:
            raise ToolServerError(f"the list up to {label} has {num_chars} characters, at most {MAX_CHARS} fit")
        schema = schema_text(tools[-1])
        if schema not in _sound:
            if problem := await _ask("schema", schema):
                raise ToolServerError(f"{label}: {problem}")
            _sound.add(schema)
    return tools


def schema_text(tool: Mapping[str, Any]) -> str:
    """Return the schema of a tool's arguments as JSON."""
    return json.dumps(tool["function"]["parameters"])


async def refuse_wrong(schema: str, arguments: Mapping[str, Any], *, is_own: bool = False) -> None:
    """Raise `BadArgumentsError` for those that a schema refuses, `ToolServerError` if the check takes too long.

    is_own: the schema is that of a Python function, so only `SLOW` can make its check long.
    """
    if is_own and not any(word in schema for word in SLOW):
        problem = arguments_problem(schema, arguments)
    else:
        problem = await _ask("arguments", schema, arguments=arguments)
    if problem:
        raise BadArgumentsError(problem)


async def _ask(do: str, schema: str, **arguments: Any) -> str | None:
    reason = None
    for _ in range(ATTEMPTS):
        checker = host(sys.executable, PROGRAM)
        start = time.monotonic()
        try:
            if checker not in _ready:
                await checker.ask("ready", timeout_s=START_S)
                _ready.add(checker)
                start = time.monotonic()
            return await checker.ask(do, timeout_s=CHECK_S, schema=schema, **arguments)
        except asyncio.CancelledError:
            checker.end()  # the next check would wait for this one
            raise
        except EnvironmentFault as fault:
            if checker in _ready and time.monotonic() - start >= CHECK_S:
                raise ToolServerError(f"a check by its schema took more than {CHECK_S:g} s") from None
            reason = fault  # another check, and the host was killed for it
    raise ToolServerError(f"its schema could not be checked: {reason}")
