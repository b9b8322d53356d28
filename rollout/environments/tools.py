"""A model with tools: its calls are answered until it writes a turn without one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollout.environments.prompt import Prompt
from rollout.environments.python_tools import Toolbox, ToolFunction, count_results, load_tools
from rollout.episode.environment import Step
from rollout.records import Message


class ToolEnvironment:
    """Calls tools until the model answers without a tool call. How many turns it may take is the episode's limit."""

    def __init__(
        self,
        functions: Sequence[ToolFunction] = (),
        *,
        files: Sequence[str] = (),
        prompt_column: str | None = None,
        system_prompt: str | None = None,
        tool_timeout_s: float = 10.0,
        max_result_chars: int = 8192,
    ):
        """functions: tools as Python functions. files: more of them, as `path/to/file.py:name,other`.

        Raises:
            ConfigError: a function cannot be a tool, or a file cannot be loaded.
        """
        loaded = [function for file in files for function in load_tools(file)]
        self._toolbox = Toolbox([*functions, *loaded], timeout_s=tool_timeout_s, max_result_chars=max_result_chars)
        self._prompt = Prompt(column=prompt_column, system=system_prompt)

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return self._toolbox.schemas

    async def reset(self, example: Mapping[str, Any]) -> Sequence[Message]:
        return self._prompt.messages(example)

    async def step(self, message: Message) -> Step:
        results = await self._toolbox.answer(message)
        return Step(
            messages=tuple(result.message for result in results),
            done=not results,
            outcome=count_results(results),
        )
