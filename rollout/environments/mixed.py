"""Several environments in one run: each row names its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollout.episode.environment import Concludes, Environment, HostsConversations, OpenConversation, RunsItself, Step
from rollout.errors import ConfigError, DataError
from rollout.records import Message


class Mixed:
    """Becomes, on reset, the environment that the row names; before that it has no tools.

    Parts that run their own episodes are never reset: `rollout/sampler/sampler.py` asks `choose`.
    """

    def __init__(
        self,
        environments: Mapping[str, Mapping[str, Any]],
        *,
        column: str = "environment",
        default: str | None = None,
        **shared: Any,
    ):
        """environments: settings by environment name. column: where a row says its name. default: for rows that do
        not. shared: settings for all of them, such as system_prompt; an environment's own come first.

        Raises:
            ConfigError: a name is unknown, settings do not fit, or `default` is not among the names.
        """
        from rollout.environments import make_environment  # this module is one of those it lists

        if default is not None and default not in environments:
            raise ConfigError(f"mixed: default is {default!r}, expected one of {', '.join(environments)}")
        self._column = column
        self._default = default
        self._by_name = {name: make_environment(name, **{**shared, **own}) for name, own in environments.items()}
        self._current: Environment | None = None

    @property
    def parts(self) -> Sequence[Environment | RunsItself]:
        return tuple(self._by_name.values())

    def choose(self, example: Mapping[str, Any]) -> Environment | RunsItself:
        """The part that the row names. Raises `DataError` if there is no such part."""
        name = example.get(self._column) or self._default
        if name not in self._by_name:
            raise DataError(
                f"mixed: column {self._column!r} says {name!r}, expected one of {', '.join(self._by_name)}; "
                "add it to environment.settings.environments or set environment.settings.default"
            )
        return self._by_name[name]

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return self._current.tools if self._current is not None else ()

    @property
    def max_calls(self) -> int | None:
        return self._current.max_calls if isinstance(self._current, HostsConversations) else None

    def host(self, open_conversation: OpenConversation) -> None:
        for environment in self._by_name.values():
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
    """What plays this row: the part of `Mixed` that it names, or the environment itself. Raises `DataError`."""
    return environment.choose(example) if isinstance(environment, Mixed) else environment
