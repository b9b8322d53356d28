"""Environment `single_turn`: one prompt, one answer, for RLVR data sets and data sets of single tool calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.rollout.chat.messages import Tools
from lockstep.rollout.environments.declaration import Declaration
from lockstep.rollout.environments.prompt import PromptReader, without_nulls
from lockstep.rollout.episode.environment import Step
from lockstep.rollout.errors import ConfigError, DataError
from lockstep.rollout.records import Message

JSON_TYPES = {
    "str": "string", "int": "integer", "float": "number", "bool": "boolean", "list": "array", "tuple": "array",
    "set": "array", "dict": "object",
}  # fmt: skip
"""JSON schema types by Python's names, which some data sets have."""


class SingleTurn:
    """Ends after the first assistant turn. The row's tools are shown to the model and never run."""

    declaration = Declaration(reads="prompt", max_turns=1)

    def __init__(
        self,
        *,
        prompt_column: str | None = None,
        system_prompt: str | None = None,
        prompt_template: str = "{prompt}",
        tools_column: str = "tools",
    ):
        """prompt_template: the user turn, with {prompt} for the row's text; rows with messages are not changed.

        Raises `ConfigError`: a template without {prompt}.
        """
        if "{prompt}" not in prompt_template:
            raise ConfigError(
                f"prompt_template={prompt_template!r:.80} has no {{prompt}}, so that all rows would be the same; set "
                "environment.settings.prompt_template='{prompt} Answer in one word.'"
            )
        self._prompt = PromptReader(column=prompt_column, system=system_prompt, template=prompt_template)
        self._tools_column = tools_column
        self.tools: Tools = ()

    def read_row(self, example: Mapping[str, Any]) -> Sequence[Message]:
        self.tools = row_tools(example, self._tools_column)
        return self._prompt.messages(example)

    async def reset(self, example: Mapping[str, Any]) -> Sequence[Message]:
        return self.read_row(example)

    async def step(self, message: Message) -> Step:
        return Step(done=True)


def row_tools(example: Mapping[str, Any], column: str) -> Tools:
    """Return the row's tools in the OpenAI form; none if it has no such column, or an empty one.

    The column holds a list, or its JSON text, of OpenAI tools, of functions with a JSON schema in `parameters`, or of
    functions whose `parameters` are described one by one (`{"city": {"type": "str", "description": ...}}`, the form of
    xLAM's data). In the last form, parameters are required unless they have a default or are called optional. Raises
    `DataError`: the column holds something else.
    """
    value = example.get(column) or None  # an empty cell of CSV is an empty text
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise DataError(f"column {column}: expected tools as JSON, found {value!r:.80} ({error})") from error
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise DataError(f"column {column}: expected a list of tools, found {type(value).__name__} {value!r:.80}")
    return [_tool(entry, column) for entry in value]


def _tool(entry: Any, column: str) -> Mapping[str, Any]:
    function = entry.get("function", entry) if isinstance(entry, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"column {column}: expected tools with a name, found {entry!r:.120}")
    parameters = function.get("parameters") or {}
    if not isinstance(parameters, Mapping):
        raise DataError(f"column {column}: tool {function['name']} has parameters {parameters!r:.120}")
    if parameters.get("type") != "object":
        parameters = _schema(parameters)
    return {
        "type": "function",
        "function": {
            "name": function["name"],
            "description": str(function.get("description") or ""),
            # Columnar files give every tool the parameters of all tools; null ones belong to another tool.
            "parameters": without_nulls(parameters),
        },
    }


def _schema(described: Mapping[str, Any]) -> dict[str, Any]:
    properties, required = {}, []
    for name, about in described.items():
        if about is None:
            continue
        about = about if isinstance(about, Mapping) else {"description": str(about)}
        kind, *rest = str(about.get("type", "str")).split(",")
        kind = JSON_TYPES.get(kind.strip().partition("[")[0].lower(), kind.strip())
        described_as = {"type": kind, "description": about.get("description")}
        properties[name] = {key: value for key, value in described_as.items() if value is not None}
        if "default" not in about and "optional" not in "".join(rest):
            required.append(name)
    return {"type": "object", "properties": properties, "required": required}
