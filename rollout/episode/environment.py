"""Environment protocol: from a data row to messages, and from an assistant turn to the messages that answer it.

An environment lives for one episode and handles messages only. It is an `Environment`, or `RunsItself` if it asks the
model on its own; `ReadsRows`, `HostsConversations`, `Concludes`, `ChecksSystem`, `ShowsImages` and `Closes` are
optional.
`rollout/environments/__init__.py` finds them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from lockstep.rollout.chat.messages import Tools
from lockstep.rollout.episode.conversation import Conversation
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.records import Message
from lockstep.rollout.system.user_functions import load_function


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An environment's answer to one assistant turn."""

    messages: tuple[Message, ...] = ()
    """Messages that the model reads next: tool results, a user turn. Empty when `done`."""
    done: bool = False
    outcome: Mapping[str, Any] = field(default_factory=dict)
    """Facts for rewards and metrics, merged over the episode; numbers of the same name are added up."""


class Environment(Protocol):
    @property
    def tools(self) -> Tools:
        """Tools that the model may call. Read once, after `reset`. May be empty."""
        ...

    async def reset(self, example: Mapping[str, Any]) -> Sequence[Message]:
        """Return the first messages of an episode on this data row."""
        ...

    async def step(self, message: Message) -> Step:
        """React to an assistant message (`content`, `tool_calls` with parsed or raw arguments, `reasoning_content`).

        A tool that raises, hangs or is called wrongly is answered with a tool message: the model must see its mistake.
        """
        ...


class RunsItself:
    """A user's function that runs whole episodes, played by the driver that its class declares."""

    def __init__(
        self,
        setting: str,
        function: str | Callable[..., Any] | None,
        *,
        timeout_s: float = 600.0,
        max_concurrent: int = 64,
    ) -> None:
        """Raises `ConfigError` if a limit is out of range, or the function is missing or cannot be loaded.

        setting: name of the setting that holds the function. function: itself, or `path/to/file.py:function`.
        timeout_s: wall-clock limit of one episode.
        max_concurrent: episodes that run at once (each takes a thread and a few sockets); the others wait.
        """
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s={timeout_s} must be greater than 0; set environment.settings.timeout_s=600")
        if max_concurrent < 1:
            raise ConfigError(f"max_concurrent={max_concurrent} must be at least 1")
        if function is None:
            raise ConfigError(f"no {setting} is set; set environment.settings.{setting}=path/to/file.py:function")
        self.function = load_function(function) if isinstance(function, str) else function
        if not callable(self.function):
            raise ConfigError(
                f"found {setting}={function!r}; set environment.settings.{setting}=path/to/file.py:function"
            )
        self.timeout_s = timeout_s
        self.max_concurrent = max_concurrent


@runtime_checkable
class ReadsRows(Protocol):
    """An environment that can read a row without an episode, so that all rows are checked before a run starts."""

    def read_row(self, example: Mapping[str, Any]) -> Sequence[Message]:
        """Return the messages of the row; empty if the environment writes its own. Starts nothing.

        Raises `DataError` for a row that no episode can use.
        """
        ...


def messages_of_row(environment: Environment | RunsItself, example: Mapping[str, Any]) -> Sequence[Message]:
    """Return `read_row`; nothing without it, or if a subclass begins its episodes in another way."""
    names = [name for kind in type(environment).__mro__ for name in ("read_row", "reset") if name in vars(kind)]
    return environment.read_row(example) if isinstance(environment, ReadsRows) and names[0] == "read_row" else ()


OpenConversation = Callable[..., Conversation]
"""`open_conversation(messages, tools=())`: begin a conversation beside the episode's own, with its own tools."""


@runtime_checkable
class HostsConversations(Protocol):
    """An environment whose episodes hold several conversations with the model: sub-agents, debates, a user that the
    policy plays. Every token sampled in any of them is trained, with the reward of the rollout."""

    @property
    def max_calls(self) -> int | None:
        """Maximum of engine calls of the episode, over all its conversations; None for no limit."""
        ...

    def host(self, open_conversation: OpenConversation) -> None:
        """Receive `open_conversation`. Called once, before `reset`; it may be used until the episode ends.

        Conversations may run at the same time; their seeds do not depend on which of them is answered first.
        """
        ...


@runtime_checkable
class Concludes(Protocol):
    """An environment that reports facts when the episode is over, however it ended."""

    async def conclude(self) -> Mapping[str, Any]:
        """Return facts for the outcome. Called once, unless the rollout failed."""
        ...


@runtime_checkable
class ChecksSystem(Protocol):
    """An environment that needs something of the system, which may be missing."""

    async def problem(self) -> str | None:
        """Return the reason why no episode can be played, in a sentence, or None. Called before a run starts."""
        ...


@runtime_checkable
class ShowsImages(Protocol):
    """Environment that has images only for a model that sees them."""

    sees_images: bool
    """True if the model sees images; set before `reset`."""


@runtime_checkable
class Closes(Protocol):
    """An environment that holds something outside of itself: a session of a server, a game in another process."""

    async def close(self) -> None:
        """Let go of it. Called once at the end of each episode, on every path, also if `reset` failed. Never raises."""
        ...
