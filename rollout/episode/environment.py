"""What an environment is: it turns a data row into messages, and an assistant turn into what comes next.

An environment lives for one episode. It speaks messages only; tokens are `rollout/chat/chat.py`'s business and
sampling is `rollout/episode/episode.py`'s. Environments by name are listed in `rollout/environments/__init__.py`.

`Environment` is all that is needed, or `RunsItself` for what asks the model on its own. Two more protocols are for
those that need them: `HostsConversations` opens further conversations with the model, `Concludes` has a last word when
the episode ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from rollout.errors import ConfigError
from rollout.records import Message

Tools = Sequence[Mapping[str, Any]]
"""JSON schemas of tools, in the OpenAI form, as the chat template renders them."""


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
    def tools(self) -> Tools:
        """Tools that the model may call. Read once, after `reset`. May be empty."""
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


class RunsItself:
    """In place of an `Environment`: what runs its episodes by itself, so that there is nothing to reset and no turn to
    answer. `rollout/sampler/sampler.py` knows how each kind is run."""

    def __init__(self, *, timeout_s: float, max_concurrent: int) -> None:
        """timeout_s: of one episode, by the clock. max_concurrent: episodes that run at once (each takes a thread and a
        few sockets); the others wait. Raises `ConfigError`."""
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s={timeout_s} must be greater than 0; set environment.settings.timeout_s=600")
        if max_concurrent < 1:
            raise ConfigError(f"max_concurrent={max_concurrent} must be at least 1")
        self.timeout_s = timeout_s
        self.max_concurrent = max_concurrent


class Conversation(Protocol):
    """A conversation with the model that is trained. Its calls belong to the rollout of the episode."""

    @property
    def messages(self) -> Sequence[Message]:
        """Everything said so far, assistant turns included."""
        ...

    async def ask(self, new_messages: Sequence[Message] = ()) -> Message:
        """Say something, and sample the assistant's turn.

        Raises:
            ContextFullError: the conversation no longer fits the model.
            CallLimitError: the episode has no calls left, or is over.
            TemplateError: the chat template refuses the messages.
            EngineError, EvidenceError: the engine failed. The episode ends with it, whoever catches it here.
        """
        ...


class OpenConversation(Protocol):
    """Begins a conversation that goes on beside the episode's own, with other messages and other tools."""

    def __call__(self, messages: Sequence[Message], tools: Tools = ()) -> Conversation: ...


@runtime_checkable
class HostsConversations(Protocol):
    """An environment whose episodes hold several conversations with the model: sub-agents, debates, a user that the
    policy plays. Every token that any of them sampled is trained, with the reward of the rollout."""

    @property
    def max_calls(self) -> int | None:
        """Engine calls of the episode at most, over all its conversations; None for no limit."""
        ...

    def host(self, open_conversation: OpenConversation) -> None:
        """Called once, before `reset`. A conversation may be opened at any time until the episode ends.

        Conversations may run at the same time. Each is seeded by its number in the order of opening and by its own
        turns, so what is sampled does not depend on which of them is answered first.
        """
        ...


@runtime_checkable
class Concludes(Protocol):
    """An environment that has something to report when the episode is over, however it ended."""

    async def conclude(self) -> Mapping[str, Any]:
        """Facts for the outcome. Called once, unless the rollout failed."""
        ...
