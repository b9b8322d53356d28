"""Environment `textarena`: a game of TextArena (github.com/LeonGuertler/TextArena).

A data row holds `seed` and may hold `env_id`; `data.path=seeds:1000` makes such rows. The model reads what is new for
its player since its last turn, so a conversation only extends. The reward is the game's, as outcome
`environment_reward`. The games run in a host (`rollout/hosts/process.py`), which may be another
interpreter.

Games of several players: the model plays one seat, and a function of the user the others.

Not covered: self-play with training of both sides; games that ask a model of OpenRouter (`TwentyQuestions`,
`GuessWho`).
"""

from __future__ import annotations

import importlib.util
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.rollout.chat.messages import Tools
from lockstep.rollout.environments.declaration import Declaration
from lockstep.rollout.episode.environment import Step
from lockstep.rollout.errors import ConfigError, DataError, EnvironmentFault
from lockstep.rollout.hosts.process import Host, host, interpreter
from lockstep.rollout.records import Message
from lockstep.rollout.replies import read_number
from lockstep.rollout.safe_text import error_text
from lockstep.rollout.system.deadline import call_with_deadline
from lockstep.rollout.system.user_functions import load_function

PROGRAM = Path(__file__).parents[1] / "hosts" / "textarena_games.py"
CLOSE_TIMEOUT_S = 5.0


class TextArenaEnvironment:
    """One game; its state lives in the host until `close`."""

    declaration = Declaration(reads="seed", max_turns=16, opens="an interpreter with a package of games")
    tools: Tools = ()

    def __init__(
        self,
        *,
        env_id: str | None = None,
        settings: Mapping[str, Any] | None = None,
        num_players: int = 1,
        seat: int = 0,
        opponent: str | Callable[[str], Any] | None = None,
        python: str | None = None,
        timeout_s: float = 60.0,
        unfinished_reward: float = 0.0,
        system_prompt: str | None = None,
    ):
        """env_id: game of rows without one, `GuessTheNumber-v0`. settings: its keyword arguments.

        num_players, seat: players of the game, and the one that the model plays.
        opponent: `path/to/file.py:function` from the text that a player reads to its move, for the other seats.
        python: interpreter with the package; None: this one. timeout_s: limit of one move.
        unfinished_reward: reward of a game that did not end within the episode.
        Raises `ConfigError`: the package or the interpreter is missing, or settings contradict each other.
        """
        self._python = interpreter(python)
        if python is None and importlib.util.find_spec("textarena") is None:
            raise ConfigError(
                "environment textarena needs the textarena package; type: pip install 'lockstep-rl[textarena]', or set "
                "environment.settings.python=<an interpreter that has it>"
            )
        if not 0 <= seat < num_players:
            raise ConfigError(f"environment textarena: found seat={seat} and num_players={num_players}; set seat below")
        if num_players > 1 and opponent is None:
            raise ConfigError(
                f"environment textarena: num_players={num_players} needs moves for the other seats; set "
                "environment.settings.opponent=path/to/file.py:function"
            )
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s={timeout_s} must be greater than 0; set environment.settings.timeout_s=60")
        self._env_id, self._settings, self._num_players = env_id, dict(settings or {}), num_players
        self._seat, self._timeout_s, self._unfinished = seat, timeout_s, float(unfinished_reward)
        self._opponent = load_function(opponent) if isinstance(opponent, str) else opponent
        self._system_prompt = system_prompt
        self._episode = uuid.uuid4().hex
        self._host: Host | None = None
        self._is_done = False

    def read_row(self, example: Mapping[str, Any]) -> Sequence[Message]:
        self._game(example)
        return ()

    def _game(self, example: Mapping[str, Any]) -> tuple[str, int]:
        env_id, seed = example.get("env_id") or self._env_id, example.get("seed")
        if not isinstance(env_id, str):
            raise DataError("textarena: no game; set environment.settings.env_id, or column env_id of the row")
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise DataError(f"textarena: column seed holds {seed!r}, expected a whole number; try data.path=seeds:1000")
        return env_id, seed

    async def reset(self, example: Mapping[str, Any]) -> Sequence[Message]:
        env_id, seed = self._game(example)
        self._host = host(self._python, PROGRAM)
        opening = {"env_id": env_id, "num_players": self._num_players, "seed": seed, "settings": self._settings}
        try:
            view = await self._until_own_turn(await self._ask("open", **opening))
        except ConfigError as error:
            if example.get("env_id"):  # of this row, not of the settings
                raise DataError(str(error)) from error
            raise
        if self._is_done:
            raise DataError(f"textarena: {env_id} with seed {seed} ended before the player's first move")
        system = () if self._system_prompt is None else ({"role": "system", "content": self._system_prompt},)
        return (*system, _user(view))

    async def step(self, message: Message) -> Step:
        """Play the model's move, and those of the others until it is its turn. Raises `EnvironmentFault`."""
        view = await self._until_own_turn(await self._ask("act", text=str(message.get("content") or "")))
        if not self._is_done:
            return Step(messages=(_user(view),), outcome={"moves": 1})
        try:
            reward, facts = read_number(view["rewards"][str(self._seat)]), view["facts"][str(self._seat)]
            return Step(
                done=True,
                outcome={
                    **{"environment_reward": reward, "moves": 1, "finished": 1},
                    "invalid_move": int(bool(facts["is_invalid"])),
                },
            )
        except (KeyError, TypeError, ValueError) as error:
            raise EnvironmentFault(f"textarena: the game ended without a reward of player {self._seat}") from error

    async def conclude(self) -> Mapping[str, Any]:
        return {} if self._is_done else {"environment_reward": self._unfinished, "finished": 0}

    async def close(self) -> None:
        if self._host is not None and self._host.is_alive:
            try:
                await self._host.ask("close", timeout_s=CLOSE_TIMEOUT_S, episode=self._episode)
            except EnvironmentFault:  # the host is gone, and the game with it
                return

    async def _until_own_turn(self, view: Mapping[str, Any]) -> Mapping[str, Any]:
        while not (done := view["is_done"]) and view["player"] != self._seat:
            if self._opponent is None:
                raise EnvironmentFault(f"textarena: player {view['player']} is to move, in a game of one player")
            result = await call_with_deadline(partial(self._opponent, view["text"]), timeout_s=self._timeout_s)
            if result.error is not None:
                raise EnvironmentFault(
                    f"textarena: the opponent raised {type(result.error).__name__}: {error_text(result.error)}"
                )
            view = await self._ask("act", text=str(result.value))
        self._is_done = bool(done)
        return view

    async def _ask(self, do: str, **arguments: Any) -> Mapping[str, Any]:
        assert self._host is not None, "reset was called"
        try:
            view = await self._host.ask(do, timeout_s=self._timeout_s, episode=self._episode, **arguments)
        except ConfigError as error:
            if do == "open":
                raise
            raise EnvironmentFault(str(error)) from error
        types = {"is_done": bool, "player": int, "text": str}
        if isinstance(view, Mapping) and view.get("is_done") is True:
            types = {"is_done": bool, "rewards": dict, "facts": dict}
        if not isinstance(view, Mapping) or any(type(view.get(name)) is not kind for name, kind in types.items()):
            raise EnvironmentFault(f"textarena: the host answered {view!r:.120}, expected {', '.join(types)}")
        return view


def _user(view: Mapping[str, Any]) -> Message:
    # Games may send lone surrogates back, which a tokenizer cannot encode.
    return {"role": "user", "content": str(view["text"]).encode("utf-8", "replace").decode("utf-8")}
