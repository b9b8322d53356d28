"""One prompt, one answer: the environment of classic RLVR data sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollout.environment import Step
from rollout.environments.prompt import Prompt
from rollout.records import Message


class SingleTurn:
    """Ends after the first assistant turn."""

    def __init__(self, *, prompt_column: str | None = None, system_prompt: str | None = None):
        self._prompt = Prompt(column=prompt_column, system=system_prompt)

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return ()

    async def reset(self, example: Mapping[str, Any]) -> Sequence[Message]:
        return self._prompt.messages(example)

    async def step(self, message: Message) -> Step:
        return Step(done=True)
