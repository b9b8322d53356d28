"""Environment `gymnasium`: an environment of Gymnasium (gymnasium.farama.org) whose actions are words.

A data row holds `seed` and may hold `env_id`; `data.path=seeds:1000` makes such rows. The model reads what the
environment renders as text, or its observation, and answers with the name of an action. The sum of the rewards is
outcome `environment_reward`.

Not covered: action spaces that are not discrete, images, and environments that need a process of their own.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lockstep.rollout.chat.messages import Tools
from lockstep.rollout.environments.declaration import Declaration
from lockstep.rollout.episode.environment import Step
from lockstep.rollout.errors import ConfigError, DataError, EnvironmentFault
from lockstep.rollout.records import Message
from lockstep.rollout.replies import read_number
from lockstep.rollout.safe_text import error_text
from lockstep.rollout.system.deadline import call_with_deadline


class GymnasiumEnvironment:
    """Plays one episode of an environment, which lives until `close`."""

    declaration = Declaration(reads="seed", max_turns=32, opens="a package of environments")
    tools: Tools = ()

    def __init__(
        self,
        *,
        env_id: str | None = None,
        settings: Mapping[str, Any] | None = None,
        actions: Sequence[str] | None = None,
        system_prompt: str | None = None,
        timeout_s: float = 60.0,
    ):
        """env_id: environment of rows without one, `FrozenLake-v1`. settings: keyword arguments of `gymnasium.make`.

        actions: names of the actions in the order of their numbers; None: the numbers themselves.
        timeout_s: limit of one call of the environment.
        Raises `ConfigError`: the package is missing, or two actions have one name.
        """
        if importlib.util.find_spec("gymnasium") is None:
            raise ConfigError("environment gymnasium needs its package; type: pip install 'lockstep-rl[gymnasium]'")
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s={timeout_s} must be greater than 0; set environment.settings.timeout_s=60")
        self._actions = None if actions is None else tuple(str(action).strip().lower() for action in actions)
        if self._actions is not None and len(set(self._actions)) < len(self._actions):
            raise ConfigError(
                f"environment gymnasium: found actions={list(self._actions)}; expected a name of its own for each, "
                "such as environment.settings.actions=[left,down,right,up]"
            )
        self._env_id, self._settings, self._timeout_s = env_id, dict(settings or {}), timeout_s
        self._system_prompt = system_prompt
        self._game: Any = None
        self._is_over = False

    def read_row(self, example: Mapping[str, Any]) -> Sequence[Message]:
        self._episode(example)
        return ()

    def _episode(self, example: Mapping[str, Any]) -> tuple[str, int]:
        env_id, seed = example.get("env_id") or self._env_id, example.get("seed")
        if not isinstance(env_id, str):
            raise DataError("gymnasium: no environment; set environment.settings.env_id, or column env_id of the row")
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise DataError(f"gymnasium: column seed holds {seed!r}, expected a whole number; try data.path=seeds:1000")
        return env_id, seed

    async def reset(self, example: Mapping[str, Any]) -> Sequence[Message]:
        """Return the first observation and the names of the actions. Raises `ConfigError`, `EnvironmentFault`."""
        env_id, seed = self._episode(example)
        try:
            self._game = await self._call(functools.partial(_make, env_id, self._settings))
        except EnvironmentFault as fault:
            raise ConfigError(f"{fault}; set environment.settings.env_id and settings to what gymnasium has") from fault
        count = getattr(self._game.action_space, "n", None)
        if count is None or getattr(self._game.action_space, "start", 0) != 0:
            raise ConfigError(
                f"gymnasium: {env_id} has the action space {self._game.action_space}, expected discrete actions from 0"
            )
        if self._actions is None:
            self._actions = tuple(map(str, range(count)))
        if len(self._actions) != count:
            raise ConfigError(
                f"gymnasium: {env_id} has {count} actions, environment.settings.actions names {len(self._actions)}"
            )
        observation, _ = await self._call(functools.partial(self._game.reset, seed=seed))
        text = f"{await self._text_of(observation)}\nAnswer with one of: {', '.join(self._actions)}."
        system = () if self._system_prompt is None else ({"role": "system", "content": self._system_prompt},)
        return (*system, {"role": "user", "content": text})

    async def step(self, message: Message) -> Step:
        """Take the action that the turn names. Raises `EnvironmentFault`."""
        assert self._actions is not None, "reset was called"
        action = str(message.get("content") or "").strip().strip(".").lower()
        if action not in self._actions:
            text = f"That is not an action. Answer with one of: {', '.join(self._actions)}."
            return Step(messages=({"role": "user", "content": text},), outcome={"invalid_actions": 1})
        observation, reward, terminated, cut, _ = await self._call(
            functools.partial(self._game.step, self._actions.index(action))
        )
        try:
            outcome = {"environment_reward": read_number(reward), "moves": 1}
        except ValueError as error:
            raise EnvironmentFault(f"gymnasium: the reward of a step: {error}") from error
        self._is_over = bool(terminated or cut)
        if self._is_over:
            return Step(done=True, outcome={**outcome, "finished": 1})
        return Step(messages=({"role": "user", "content": await self._text_of(observation)},), outcome=outcome)

    async def conclude(self) -> Mapping[str, Any]:
        """Return a reward of 0 for an episode without a step that had one."""
        return {"environment_reward": 0.0, "finished": 0} if not self._is_over else {}

    async def close(self) -> None:
        if self._game is not None:
            await call_with_deadline(self._game.close, timeout_s=self._timeout_s)

    async def _text_of(self, observation: Any) -> str:
        """Return the environment as text: rendered, or its observation."""
        rendering = await self._call(self._game.render) if self._game.render_mode == "ansi" else None
        return str(observation if rendering is None else rendering).encode("utf-8", "replace").decode("utf-8")

    async def _call(self, function: Callable[[], Any]) -> Any:
        result = await call_with_deadline(function, timeout_s=self._timeout_s)
        if result.error is not None:
            error = result.error
            raise EnvironmentFault(f"gymnasium: {type(error).__name__}: {error_text(error)}") from error
        return result.value


def _make(env_id: str, settings: Mapping[str, Any]) -> Any:
    """Make an environment that renders text if it can."""
    make = functools.partial(importlib.import_module("gymnasium").make, env_id, **settings)
    game = make()
    if "render_mode" in settings or "ansi" not in game.metadata.get("render_modes", ()):
        return game
    game.close()
    return make(render_mode="ansi")
