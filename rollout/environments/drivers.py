"""Drivers: how the episodes of an environment are played, and what they share while a run lasts.

An environment names its driver in its declaration. `turn_by_turn` is here; `integrations/environments/` has those of
agents at the gateway and of TRL's rollout functions.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from lockstep.rollout.engine.protocol import Engine, Sampling
from lockstep.rollout.environments.gateway_settings import GatewaySettings
from lockstep.rollout.episode.environment import Environment, RunsItself
from lockstep.rollout.episode.episode import CALL_TIMEOUT_S, run_episode
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
