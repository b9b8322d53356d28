"""Registry of environments by the name of a setting, or from a user's file. One instance lives for one episode."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lockstep.rollout.environments.adapters.openenv import OpenEnvironment
from lockstep.rollout.environments.adapters.textarena import TextArenaEnvironment
from lockstep.rollout.environments.adapters.trl import TRLEnvironment
from lockstep.rollout.environments.adapters.trl_rollout import TRLRollout
from lockstep.rollout.environments.adapters.verifiers import VerifiersEnvironment
from lockstep.rollout.environments.agent import AgentEnvironment
from lockstep.rollout.environments.calculator import CalculatorEnvironment, SlowCalculatorEnvironment
from lockstep.rollout.environments.chain import ChainEnvironment
from lockstep.rollout.environments.mixed import AnyEnvironment, Mixed
from lockstep.rollout.environments.sandboxed_tools import SandboxEnvironment
from lockstep.rollout.environments.search import SearchEnvironment
from lockstep.rollout.environments.single_turn import SingleTurn
from lockstep.rollout.environments.subagents import SubAgents
from lockstep.rollout.environments.tool_servers.mcp import McpEnvironment
from lockstep.rollout.environments.tools import ToolEnvironment
from lockstep.rollout.environments.user import SimulatedUser
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.system.user_functions import load_function


def make_environment(name: str, **settings: Any) -> AnyEnvironment:
    """Make an environment for one episode. name: one of `ENVIRONMENTS`, or `path/to/file.py:ClassName`.

    Raises `ConfigError`: the name is unknown, its file cannot be loaded, or it does not take these settings.
    """
    factory = load_function(name) if ":" in name else ENVIRONMENTS.get(name)
    if factory is None:
        raise ConfigError(
            f"unknown environment {name!r}; expected one of {', '.join(ENVIRONMENTS)}, or path/to/file.py:ClassName"
        )
    try:
        return factory(**settings)
    except TypeError as error:
        raise ConfigError(f"environment {name}: {error}") from error


ENVIRONMENTS: dict[str, Callable[..., AnyEnvironment]] = {
    "single_turn": SingleTurn,
    "tools": ToolEnvironment,
    "mcp": McpEnvironment,
    "sandbox": SandboxEnvironment,
    "search": SearchEnvironment,
    "user": SimulatedUser,
    "mixed": partial(Mixed, make=make_environment),
    "calculator": CalculatorEnvironment,
    "slow_calculator": SlowCalculatorEnvironment,
    "chain": ChainEnvironment,
    "reverse": SingleTurn,
    "subagents": SubAgents,
    "agent": AgentEnvironment,
    "trl": TRLEnvironment,
    "trl_rollout": TRLRollout,
    "verifiers": VerifiersEnvironment,
    "textarena": TextArenaEnvironment,
    "openenv": OpenEnvironment,
}
