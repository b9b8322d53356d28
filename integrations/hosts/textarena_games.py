"""Program of a host that plays games of TextArena.

Games draw from Python's global generator, so each game has a state of it that is put in place while the game is asked:
games played at the same time do not change each other.
"""

from __future__ import annotations

import importlib
import random
from typing import Any

_games: dict[str, Game] = {}


class WrongSetting(Exception):
    """A setting that no game can be played with."""


class Game:
    def __init__(self, env_id: str, *, num_players: int, seed: int, settings: dict[str, Any]) -> None:
        textarena = importlib.import_module("textarena")
        if env_id not in textarena.envs.registration.ENV_REGISTRY:
            raise WrongSetting(f"TextArena has no environment {env_id!r}")
        random.seed(seed)
        try:
            self._env = textarena.make(env_id, **settings)
        except TypeError as error:
            raise WrongSetting(f"TextArena's {env_id} refuses its settings: {error}") from error
        except LookupError as error:
            raise WrongSetting(f"TextArena's {env_id} needs data of nltk that is not installed: {error}") from error
        self._env.reset(num_players=num_players, seed=seed)
        self._base = self._env
        while isinstance(self._base, textarena.Wrapper):
            self._base = self._base.env
        self._own_action = textarena.ObservationType.PLAYER_ACTION
        self._is_done = False
        self.state = random.getstate()

    def act(self, text: str) -> None:
        random.setstate(self.state)
        self._is_done, _ = self._env.step(text)
        self.state = random.getstate()

    def view(self) -> dict[str, Any]:
        """Return the player to move and what it has not read yet; of a finished game the rewards by player."""
        if self._is_done:
            rewards, facts = self._env.close()
            return {
                "is_done": True,
                "rewards": {str(player): float(value) for player, value in (rewards or {}).items()},
                "facts": {
                    str(player): {"is_invalid": bool(fact.get("invalid_move")), "turns": int(fact.get("turn_count", 0))}
                    for player, fact in facts.items()
                },
            }
        player, observations = self._base.get_observation()
        roles = self._base.state.role_mapping
        lines = [
            text if kind is not self._own_action else f"[{roles.get(sender, f'Player {sender}')}] {text}"
            for sender, text, kind in observations
            if not (kind is self._own_action and sender == player)
        ]
        return {"is_done": False, "player": player, "text": "\n".join(lines)}


def answer(do: str, *, episode: str, **arguments: Any) -> dict[str, Any] | None:
    if do == "open":
        _games[episode] = Game(**arguments)
    elif do == "act":
        _games[episode].act(**arguments)
    elif do == "close":
        _games.pop(episode, None)
        return {"open": len(_games)}
    else:
        raise ValueError(f"unknown request {do!r}")
    return _games[episode].view()
