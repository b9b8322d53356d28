"""Tasks of verifiers 0.4, played by a host, whose interpreter may be another one than this.

A data row names its task by position: column `idx`, or `seed` of `data.path=seeds:1000`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.rollout.errors import ConfigError, DataError, EnvironmentFault
from lockstep.rollout.hosts.process import host
from lockstep.rollout.replies import read_number
from lockstep.rollout.system.background_loop import BackgroundLoop

PROGRAM = Path(__file__).parents[1] / "hosts" / "verifiers_episodes.py"
LOAD_TIMEOUT_S = 600.0
"""Time to load an environment, which may download a data set."""
MARGIN_S = 10.0
"""Time of an episode beyond its deadline, to end its programs, before the host counts as hung and is killed."""


class VerifiersTasks:
    """The tasks of one environment in the host of an interpreter."""

    def __init__(self, python: str, env_id: str, args: Mapping[str, Any], *, timeout_s: float) -> None:
        """Raises `ConfigError`: the interpreter has no usable package, or the environment cannot be loaded there."""
        _check(python, env_id, json.dumps(dict(args), sort_keys=True))
        self._python, self._env_id, self._args, self._timeout_s = python, env_id, dict(args), timeout_s

    async def play(self, base_url: str, api_key: str, example: Mapping[str, Any]) -> Mapping[str, Any]:
        """Play the task of a row as an agent of the gateway. Raises `EnvironmentFault`, `DataError`."""
        answer = await host(self._python, PROGRAM).ask(
            "play",
            timeout_s=self._timeout_s + MARGIN_S,
            **{"env_id": self._env_id, "args": self._args, "index": position(example)},
            **{"base_url": base_url, "api_key": api_key, "limit_s": self._timeout_s},
        )
        try:
            metrics = {f"verifiers_{name}": read_number(value) for name, value in answer["metrics"].items()}
            return {"environment_reward": read_number(answer["reward"]), **metrics}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise EnvironmentFault(f"verifiers: the host answered {answer!r:.120}") from error


def position(example: Mapping[str, Any]) -> int:
    """Return the position of a row's task. Raises `DataError`."""
    for column in ("idx", "seed"):
        value = example.get(column)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    raise DataError(
        "verifiers: no column idx or seed has the position of a task; set data.path=seeds:<number of tasks>"
    )


@functools.cache
def _check(python: str, env_id: str, args: str) -> None:
    """Load the environment once in this process. Blocks meanwhile; `host` has its own threads."""
    loop = BackgroundLoop()
    request = host(python, PROGRAM).ask("check", timeout_s=LOAD_TIMEOUT_S, env_id=env_id, args=json.loads(args))
    try:
        loop.run(request, timeout=LOAD_TIMEOUT_S + MARGIN_S)
    except (ConfigError, EnvironmentFault) as error:
        problem = str(error).rstrip(".")
        raise ConfigError(
            f"environment verifiers in {python}: {problem}; set environment.settings.python=<an interpreter with "
            "verifiers 0.4 and the environment's package>, and environment.settings.env_id and args to what it has"
        ) from error
    finally:
        loop.close()
