"""The engines of a rank that get its weights: the same ones through a run, or servers that leave and join it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.rollout.engine.protocol import SyncedEngine


class Roster:
    """Engines that stay: the error of one is raised. Servers leave and join: `rollout/server/server_roster.py`.

    It changes at the beginning of a weight sync only, when no weights move.
    """

    may_lose = False
    """True if a sync goes on without an engine that dies or hangs."""

    def __init__(self, engines: Sequence[SyncedEngine]) -> None:
        self._engines = list(engines)

    @classmethod
    def of(cls, engines: Sequence[SyncedEngine] | Roster) -> Roster:
        return engines if isinstance(engines, Roster) else Roster(engines)

    @property
    def engines(self) -> Sequence[SyncedEngine]:
        """Those that the next sync sends to, or the current one still does."""
        return self._engines

    @property
    def has_engine(self) -> bool:
        """True if an engine serves, or waits to join."""
        return bool(self._engines)

    def renew(self) -> None:
        """Let engines that wait join, before the weights are sent."""

    def is_new(self, engine: SyncedEngine) -> bool:
        """True if the engine waits for its first verified weights beside others that serve."""
        return False

    def lose(self, engine: SyncedEngine, error: Exception) -> None:
        """Leave out an engine. Raises the error if the run cannot go on without it."""
        raise error

    def serve(self) -> None:
        """Let the engines of the roster sample: all have the weights, verified."""

    @property
    def num_serving(self) -> int | None:
        """Number of engines that serve; None where that cannot change."""
        return None

    def metrics(self) -> Mapping[str, float]:
        """Return what happened since the last call."""
        return {}

    def close(self) -> None:
        """Look for engines no more; they keep running."""
