"""Environment `user`: a simulated user, whose turns come from a script or from a function."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from lockstep.rollout.chat.messages import Tools
from lockstep.rollout.environments.declaration import Declaration
from lockstep.rollout.environments.prompt import PromptReader
from lockstep.rollout.episode.environment import Step
from lockstep.rollout.errors import DataError
from lockstep.rollout.records import Message

Reply = str | None
User = Callable[[Sequence[Message]], Reply | Awaitable[Reply]]
"""Function of the conversation so far; returns the next user turn, or None to end the episode."""


class SimulatedUser:
    """Answers every assistant turn with a user turn, until the script or the function ends."""

    declaration = Declaration(reads="prompt", max_turns=4)
    tools: Tools = ()

    def __init__(
        self,
        user: User | None = None,
        *,
        turns: Sequence[str] = (),
        turns_column: str = "user_turns",
        prompt_column: str | None = None,
        system_prompt: str | None = None,
    ):
        """user: a function (sync ones must be quick: they run in the event loop). Without one, the user turns are
        the row's `turns_column` if it has that column, else `turns`."""
        self._user = user
        self._script = tuple(turns)
        self._turns_column = turns_column
        self._prompt = PromptReader(column=prompt_column, system=system_prompt)
        self._messages: list[Message] = []
        self._num_replies = 0

    def read_row(self, example: Mapping[str, Any]) -> Sequence[Message]:
        script = example.get(self._turns_column)
        if script is not None:
            if not isinstance(script, list | tuple) or not all(isinstance(turn, str) for turn in script):
                raise DataError(f"column {self._turns_column}: expected a list of texts, found {script!r}")
            self._script = tuple(script)
        return self._prompt.messages(example)

    async def reset(self, example: Mapping[str, Any]) -> Sequence[Message]:
        self._messages = list(self.read_row(example))
        self._num_replies = 0
        return tuple(self._messages)

    async def step(self, message: Message) -> Step:
        self._messages.append(message)
        reply = await self._next_reply()
        if reply is None:
            return Step(done=True)
        turn: Message = {"role": "user", "content": reply}
        self._messages.append(turn)
        self._num_replies += 1
        return Step(messages=(turn,), outcome={"user_turns": 1})

    async def _next_reply(self) -> Reply:
        if self._user is None:
            return self._script[self._num_replies] if self._num_replies < len(self._script) else None
        reply = self._user(tuple(self._messages))
        return await reply if isinstance(reply, Awaitable) else reply
