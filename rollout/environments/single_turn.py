"""Environment `single_turn`: one prompt, one answer, for RLVR data sets and data sets of single tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollout.chat.messages import Tools
from rollout.environments.prompt import PromptReader
from rollout.environments.row_tools import row_tools
from rollout.episode.environment import Step
from rollout.records import Message


class SingleTurn:
    """Ends after the first assistant turn. The row's tools are shown to the model and never run."""

    def __init__(
        self,
        *,
        prompt_column: str | None = None,
        system_prompt: str | None = None,
        tools_column: str = "tools",
    ):
        self._prompt = PromptReader(column=prompt_column, system=system_prompt)
        self._tools_column = tools_column
        self.tools: Tools = ()

    async def reset(self, example: Mapping[str, Any]) -> Sequence[Message]:
        self.tools = row_tools(example, self._tools_column)
        return self._prompt.messages(example)

    async def step(self, message: Message) -> Step:
        return Step(done=True)
