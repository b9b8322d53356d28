"""One prompt, one answer: the environment of classic RLVR data sets, and of data sets of single tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollout.environments.prompt import Prompt
from rollout.environments.row_tools import row_tools
from rollout.episode.environment import Step, Tools
from rollout.records import Message


class SingleTurn:
    """Ends after the first assistant turn. Tools that the row brings are shown to the model and never run."""

    def __init__(
        self,
        *,
        prompt_column: str | None = None,
        system_prompt: str | None = None,
        tools_column: str = "tools",
    ):
        self._prompt = Prompt(column=prompt_column, system=system_prompt)
        self._tools_column = tools_column
        self._tools: Tools = ()

    @property
    def tools(self) -> Tools:
        return self._tools

    async def reset(self, example: Mapping[str, Any]) -> Sequence[Message]:
        self._tools = row_tools(example, self._tools_column)
        return self._prompt.messages(example)

    async def step(self, message: Message) -> Step:
        return Step(done=True)
