"""What an environment is: it turns a data row into messages, and an assistant turn into what comes next.

An environment lives for one episode. It speaks messages only; tokens are `rollout/chat.py`'s business and
sampling is `rollout/episode.py`'s. Environments by name are listed in `rollout/environments/__init__.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollout.records import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An environment's answer to one assistant turn."""

    messages: tuple[Message, ...] = ()
    """What the model reads next: tool results, a user turn. Empty when `done`."""
    done: bool = False
    outcome: Mapping[str, Any] = field(default_factory=dict)
    """Facts for rewards and metrics, merged over the episode; numbers of the same name are added up."""


class Environment(Protocol):
    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """JSON schemas of the tools, in the OpenAI form, as the chat template renders them. May be empty."""
        ...

    async def reset(self, example: Mapping[str, Any]) -> Sequence[Message]:
        """The first messages of an episode on this data row."""
        ...

    async def step(self, message: Message) -> Step:
        """React to an assistant message (`content`, `tool_calls` with parsed or raw arguments, `reasoning_content`).

        A tool that raises, hangs or is called wrongly is answered with a tool message, never an exception:
        the model must be able to see its mistake.
        """
        ...
