"""Environment `trl`: a class written for TRL's `environment_factory` (the contract of TRL 1.16), unchanged.

    class Game:
        def reset(self, **row) -> str | None: ...       a text is appended to the prompt's last message
        def guess(self, number: int) -> str: ...        every public method is a tool: type hints, Google docstring
        def get_reward(self) -> float: ...              optional; all methods may be async

Covered: one factory, or several that rows choose from by column `environment`; sync and async methods; the reward
that the environment owns, as outcome `environment_reward` (`reward.functions=[environment_reward]`). TRL itself need
not be installed. The episode ends, as in TRL, with the first turn that calls no tool.

Not covered: images in observations; reward functions of a TRL script that ask for `environments`; pooled instances.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from lockstep.rollout.environments.declaration import Declaration
from lockstep.rollout.environments.toolbox import Toolbox
from lockstep.rollout.environments.tools import ToolEnvironment
from lockstep.rollout.errors import ConfigError, DataError, EnvironmentFault
from lockstep.rollout.records import Message
from lockstep.rollout.replies import read_number
from lockstep.rollout.safe_text import error_text
from lockstep.rollout.system.deadline import DeadlineExceeded, call_with_deadline
from lockstep.rollout.system.user_functions import load_function

Factory = Callable[[], Any]
_NOT_TOOLS = ("reset", "get_reward")


class TRLEnvironment(ToolEnvironment):
    """Plays an instance of a user's class: its methods are the tools, its state is that of the episode."""

    declaration = Declaration(reads="prompt", max_turns=8)

    def __init__(
        self,
        factory: str | Factory | Mapping[str, str | Factory] | None = None,
        *,
        column: str = "environment",
        prompt_column: str | None = None,
        system_prompt: str | None = None,
        tool_timeout_s: float = 10.0,
        max_result_chars: int = 8192,
    ):
        """Raises `ConfigError` if `factory` is missing or cannot be loaded.

        factory: a class, or a function without arguments that makes an instance; or `path/to/file.py:name`; or several
        of them by name. column: with several factories, the column of the row that holds the name.
        tool_timeout_s: limit of one method call, the factory, `reset` and `get_reward` included.
        """
        if not factory:
            raise ConfigError("no factory is set; set environment.settings.factory=path/to/file.py:ClassName")
        super().__init__(prompt_column=prompt_column, system_prompt=system_prompt)
        self._make_toolbox = partial(Toolbox, timeout_s=tool_timeout_s, max_result_chars=max_result_chars)
        factories = factory if isinstance(factory, Mapping) else {None: factory}
        self._factories = {name: load_function(one) if isinstance(one, str) else one for name, one in factories.items()}
        self._column = column if isinstance(factory, Mapping) else None
        self._timeout_s = tool_timeout_s
        self._instance: Any = None

    def read_row(self, example: Mapping[str, Any]) -> Sequence[Message]:
        self._factory(example)
        return self._prompt.opening(example)

    def _factory(self, example: Mapping[str, Any]) -> Factory:
        name = None if self._column is None else example.get(self._column)
        if not isinstance(name, str | None) or name not in self._factories:
            raise DataError(
                f"trl: column {self._column!r} says {name!r}, expected one of {', '.join(map(str, self._factories))}; "
                "add it to environment.settings.factory"
            )
        return self._factories[name]

    async def reset(self, example: Mapping[str, Any]) -> Sequence[Message]:
        self._instance = await self._call(self._factory(example), "the factory")
        methods = _methods(self._instance)
        if "reset" not in methods:
            raise ConfigError(
                f"trl: {type(self._instance).__name__} has no method reset, which TRL's contract requires"
            )
        self._toolbox = self._make_toolbox([method for key, method in methods.items() if key not in _NOT_TOOLS])
        row = {key: value for key, value in example.items() if key != self._column}
        return self._opening(example, await self._call(partial(methods["reset"], **row), "reset"))

    async def conclude(self) -> Mapping[str, Any]:
        """Return the reward of an environment that owns one."""
        get_reward = _methods(self._instance).get("get_reward")
        if get_reward is None:
            return {}
        result = await call_with_deadline(get_reward, timeout_s=self._timeout_s)
        # Reported by the reward function, which then finds no reward.
        if result.error is not None:
            return {"environment_error": f"get_reward: {type(result.error).__name__}: {error_text(result.error)}"}
        try:
            return {"environment_reward": read_number(result.value)}
        except ValueError as error:
            return {"environment_error": f"get_reward returned no reward: {error}"}

    async def _call(self, function: Callable[..., Any], name: str) -> Any:
        result = await call_with_deadline(function, timeout_s=self._timeout_s)
        if isinstance(result.error, DeadlineExceeded):
            late = f"trl: {name} gave {result.error}; raise environment.settings.tool_timeout_s"
            raise EnvironmentFault(late) from None
        if result.error is not None:
            raise result.error
        return result.value

    def _opening(self, example: Mapping[str, Any], observation: Any) -> Sequence[Message]:
        *first, last = self.read_row(example)
        if observation is None:
            return (*first, last)
        if not isinstance(observation, str):
            raise DataError(
                f"trl: {type(self._instance).__name__}.reset returned {type(observation).__name__}; expected a text or "
                "None (images are not supported)"
            )
        content = last["content"]
        if isinstance(content, list):  # with images
            return (*first, {**last, "content": [*content, {"type": "text", "text": observation}]})
        return (*first, {**last, "content": f"{content}{observation}"})


def _methods(instance: Any) -> Mapping[str, Callable[..., Any]]:
    """Return public methods by name. Listed on the class: listing an instance would evaluate its properties."""
    return {
        name: getattr(instance, name)
        for name, _ in inspect.getmembers(type(instance), predicate=inspect.isfunction)
        if not name.startswith("_")
    }
