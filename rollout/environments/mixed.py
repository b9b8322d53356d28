"""Environment `mixed`: several environments in one run; each row names its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollout.chat.messages import Tools
from rollout.episode.environment import Concludes, Environment, HostsConversations, OpenConversation, RunsItself, Step
from rollout.errors import ConfigError, DataError
from rollout.records import Message


class Mixed:
    """Becomes, on reset, the environment that the row names; it has no tools before.

    Environments that run their own episodes are never reset: `rollout/sampler/sampler.py` takes them from `choose`.
    """

    def __init__(
        self,
        environments: Mapping[str, Mapping[str, Any]],
        *,
        make: Callable[..., Environment | RunsItself],
        column: str = "environment",
        default: str | None = None,
        **shared: Any,
    ):
        """
        Args:
            environments: settings by environment name.
            make: maker of an environment from its name and settings.
            column: column of the row that holds the name.
            default: name for rows without one.
            shared: settings for all of them, such as system_prompt; an environment's own settings win.

        Raises:
            ConfigError: a name is unknown, settings do not fit, or `default` is not among the names.
        """
        if default is not None and default not in environments:
            raise ConfigError(f"mixed: default is {default!r}, expected one of {', '.join(environments)}")
        self.parts = {name: make(name, **{**shared, **own}) for name, own in environments.items()}
        self._column = column
        self._default = default
        self._current: Environment | None = None

    def choose(self, example: Mapping[str, Any]) -> Environment | RunsItself:
        """Return the environment that the row names. Raises `DataError` if it is unknown."""
        name = example.get(self._column) or self._default
        part = self.parts.get(name) if isinstance(name, str) else None
        if part is None:
            raise DataError(
                f"mixed: column {self._column!r} says {name!r}, expected one of {', '.join(self.parts)}; "
                "add it to environment.settings.environments or set environment.settings.default"
            )
        return part

    @property
    def tools(self) -> Tools:
        return self._current.tools if self._current is not None else ()

    @property
    def max_calls(self) -> int | None:
        return self._current.max_calls if isinstance(self._current, HostsConversations) else None

    def host(self, open_conversation: OpenConversation) -> None:
        for environment in self.parts.values():
            if isinstance(environment, HostsConversations):
                environment.host(open_conversation)

    async def reset(self, example: Mapping[str, Any]) -> Sequence[Message]:
        chosen = self.choose(example)
        assert not isinstance(chosen, RunsItself), "it runs its own episodes"
        self._current = chosen
        return await self._current.reset(example)

    async def step(self, message: Message) -> Step:
        assert self._current is not None, "step before reset"
        return await self._current.step(message)

    async def conclude(self) -> Mapping[str, Any]:
        return await self._current.conclude() if isinstance(self._current, Concludes) else {}


def environment_of(environment: Environment | RunsItself, example: Mapping[str, Any]) -> Environment | RunsItself:
    """Return the environment that runs this row: the one that it names in `Mixed`, else `environment` itself.

    Raises:
        DataError: the row names an unknown one.
    """
    return environment.choose(example) if isinstance(environment, Mixed) else environment
