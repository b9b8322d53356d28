"""Environment `tools`: answers the model's tool calls until it writes a turn without one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.rollout.chat.messages import Tools
from lockstep.rollout.environments.declaration import Declaration
from lockstep.rollout.environments.prompt import PromptReader
from lockstep.rollout.environments.toolbox import Toolbox, ToolFunction, count_results
from lockstep.rollout.episode.environment import Step
from lockstep.rollout.records import Message


class ToolEnvironment:
    """Runs tools until the model answers without a tool call; the episode limits the number of turns."""

    declaration = Declaration(reads="prompt", max_turns=8)
    sees_images = False
    """True if the model sees images that tools return; set before `reset`."""

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
        """functions, files, tool_timeout_s and max_result_chars: of the `Toolbox`.

        Raises `ConfigError`: a function cannot be a tool, or a file cannot be loaded.
        """
        self._toolbox = Toolbox(functions, files=files, timeout_s=tool_timeout_s, max_result_chars=max_result_chars)
        self._prompt = PromptReader(column=prompt_column, system=system_prompt)

    @property
    def tools(self) -> Tools:
        return self._toolbox.schemas

    def read_row(self, example: Mapping[str, Any]) -> Sequence[Message]:
        return self._prompt.messages(example)

    async def reset(self, example: Mapping[str, Any]) -> Sequence[Message]:
        return self.read_row(example)

    async def problem(self) -> str | None:
        if self.tools or type(self) is not ToolEnvironment:  # classes that extend it may make their tools later
            return None
        return (
            "environment=tools has no tools; set 'environment.settings.files=[my_tools.py:search,lookup]', or "
            "environment=single_turn"
        )

    async def step(self, message: Message) -> Step:
        results = await self._toolbox.answer(message, sees_images=self.sees_images)
        return Step(
            messages=tuple(result.message for result in results), done=not results, outcome=count_results(results)
        )
