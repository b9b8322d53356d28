"""Environment `mixed`: several environments in one run; each row names its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lockstep.rollout.environments.declaration import Declaration
from lockstep.rollout.episode.environment import Environment, RunsItself
from lockstep.rollout.errors import ConfigError, DataError


class Mixed:
    """Environments by name. It runs no episodes itself: `environment_of` returns the environment of a row."""

    declaration = Declaration(has_parts=True)

    def __init__(
        self,
        environments: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        make: Callable[..., AnyEnvironment],
        column: str = "environment",
        default: str | None = None,
        **shared: Any,
    ):
        """Raises `ConfigError` if a name is unknown, settings do not fit, or `default` is not among the names.

        environments: settings by environment name.
        column: column of the row that holds the name. default: name for rows without one.
        shared: settings for all of them, such as system_prompt; an environment's own settings win.
        """
        if not environments or not isinstance(environments, Mapping):
            raise ConfigError(
                f"mixed: found environments={environments!r}, expected settings by name; set "
                "'environment.settings.environments={single_turn: {}, calculator: {}}'"
            )
        for name, own in environments.items():
            if not isinstance(name, str) or not isinstance(own, Mapping):
                raise ConfigError(
                    f"mixed: found {name!r}: {own!r} among environments, expected the name of an environment and its "
                    f"settings; set 'environment.settings.environments.{name}={{}}'"
                )
        if default is not None and default not in list(environments):
            raise ConfigError(f"mixed: default is {default!r}, expected one of {', '.join(environments)}")
        self.parts = {name: make(name, **{**shared, **own}) for name, own in environments.items()}
        self._column = column
        self._default = default

    def choose(self, example: Mapping[str, Any]) -> AnyEnvironment:
        """Return the environment that the row names. Raises `DataError` if it is unknown."""
        name = example.get(self._column) or self._default
        part = self.parts.get(name) if isinstance(name, str) else None
        if part is None:
            raise DataError(
                f"mixed: column {self._column!r} says {name!r}, expected one of {', '.join(self.parts)}; "
                "add it to environment.settings.environments or set environment.settings.default"
            )
        return part


AnyEnvironment = Environment | RunsItself | Mixed


def parts_of(environment: AnyEnvironment) -> Iterator[Environment | RunsItself]:
    """Yield all environments that may run a row."""
    if isinstance(environment, Mixed):
        for part in environment.parts.values():
            yield from parts_of(part)
    else:
        yield environment


def environment_of(environment: AnyEnvironment, example: Mapping[str, Any]) -> Environment | RunsItself:
    """Return the environment that runs this row: in `Mixed` the one that it names. Raises `DataError` if unknown."""
    while isinstance(environment, Mixed):
        environment = environment.choose(example)
    return environment
