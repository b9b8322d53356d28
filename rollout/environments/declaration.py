"""Declaration of an environment, an attribute of its class: all that a run must know of it before an episode.

    class Chess:
        declaration = Declaration(reads="seed", opens="a chess program", is_deterministic=False)

The sampler, the checks, the question for `--trust-run` and the documentation read it, and no other place knows an
environment by its name. A class in a file without one has the defaults; a package's class must have one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from lockstep.rollout.engine.protocol import Engine, Sampling
from lockstep.rollout.environments.gateway_settings import GatewaySettings
from lockstep.rollout.episode.environment import Environment, RunsItself
from lockstep.rollout.episode.episode import CALL_TIMEOUT_S, run_episode
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.records import Rollout

if TYPE_CHECKING:  # it imports transformers, which takes seconds: declarations are read while settings are checked
    from lockstep.rollout.chat.chat import Chat

RunEpisode = Callable[..., Awaitable[Rollout]]
"""`run_episode` or another function of an environment and a row, with the arguments that episodes share filled in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Engine, chat and settings that a driver plays episodes with."""

    engine: Engine
    chat: Chat
    sampling: Sampling
    gateway: GatewaySettings | None = None
    call_timeout_s: float = CALL_TIMEOUT_S


Driver = Callable[[Table, Sequence[Environment | RunsItself]], AbstractAsyncContextManager[RunEpisode]]
"""Opens what the episodes of these environments share, for as long as it is entered, and gives the function that plays
one. Environments of one run with the same driver share it."""


@asynccontextmanager
async def turn_by_turn(
    table: Table, environments: Sequence[Environment | RunsItself] = ()
) -> AsyncIterator[RunEpisode]:
    """Play an environment that answers each assistant turn."""
    yield partial(run_episode, engine=table.engine, chat=table.chat, call_timeout_s=table.call_timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """Traits of an environment."""

    reads: Literal["prompt", "row", "seed"] = "row"
    """prompt: the row's prompt begins the episode. row: columns of its own. seed: column `seed`, for data that is
    made (`data.path=seeds:1000`)."""
    opens: str = ""
    """Programs, packages or servers that its settings name, or walls that they lower, in words. A saved run with such
    an environment is replayed with `--trust-run` only. Empty: nothing."""
    is_deterministic: bool = True
    """True if the answers depend on the turns alone, and on functions of the user."""
    driver: Driver = turn_by_turn
    max_turns: int = 3
    """Turns of an episode with `environment.max_turns=null`."""
    uses_gateway: bool = False
    """True if it reaches the model at the address of the gateway."""
    has_parts: bool = False
    """True if setting `environments` names the environments that play its rows."""
    runs_programs: bool = False
    """True if it runs programs of the model, without isolation if its setting `unsafe` is true."""
    demo_task: str | None = None
    """Task of the demo, `data/demo/<task>`, whose rows it reads."""
    evaluation_rows: Callable[..., Any] | None = None
    """Returns held-out rows that it brings, for `data.heldout_path=environment`; takes the environment's settings."""

    def __post_init__(self) -> None:
        """Raises `ConfigError`: a trait has a value of another type."""
        for trait in fields(self):
            value = getattr(self, trait.name)
            fits, expected = {
                "bool": (isinstance(value, bool), "True or False"),
                "int": (type(value) is int and value > 0, "a whole number above 0"),
                "str": (isinstance(value, str), "a text"),
                "str | None": (value is None or isinstance(value, str), "a text or None"),
                "Driver": (callable(value), "a driver, such as turn_by_turn"),
                "Callable[..., Any] | None": (value is None or callable(value), "a function or None"),
            }.get(str(trait.type), (value in ("prompt", "row", "seed"), "prompt, row or seed"))
            if not fits:
                raise ConfigError(f"found Declaration({trait.name}={value!r}), expected {expected}")

    @property
    def has_prompt(self) -> bool:
        """True if the first prompt of a row is known without playing it."""
        return self.reads == "prompt" and self.driver is turn_by_turn


def declaration_of(environment: object) -> Declaration:
    """Return the declaration of an environment or its class. Raises `ConfigError`: its attribute is something else."""
    declared = getattr(environment, "declaration", None)
    if declared is None:
        return Declaration()
    if not isinstance(declared, Declaration):
        kind = environment if isinstance(environment, type) else type(environment)
        raise ConfigError(
            f"found {kind.__name__}.declaration of type {type(declared).__name__}, expected declaration = "
            "Declaration(...) (lockstep/rollout/environments/declaration.py)"
        )
    return declared
