"""After an engine has died: it is started again, gets the weights of the run, and the step goes on.

Only engines of the run's own (`rollout.engine=embedded` or `colocated`), and at most `rollout.engine_restarts` times.
The new engine samples nothing before its weights were verified (`WeightSync.push`); if it dies of that, that counts as
another death. What was in flight is given up, and its prompts are sampled again with the same seeds, so a run that had
to do this ends where it would have ended without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from rollout.errors import EngineError, RankLostError, SyncError
from rollout.system.gc_freeze import gc_collect_all
from rollout.weights.sync import WeightSync
from trainer.collect.source import RolloutSource
from trainer.distributed.distributed import Distributed
from trainer.engines.run_engines import Engines

T = TypeVar("T")


class Recovery:
    """Repeats what an engine's death has ended. Every rank has one, and calls it together with the others."""

    def __init__(
        self,
        *,
        engines: Engines,
        distributed: Distributed,
        rollouts: RolloutSource,
        sync: WeightSync,
        version: Callable[[], int],
        limit: int,
        say: Callable[[str], None],
    ) -> None:
        """
        Args:
            version: of the weights now.
            limit: restarts in the life of this process.
            say: shows a person what happened.
        """
        self._engines = engines
        self._distributed = distributed
        self._rollouts = rollouts
        self._sync = sync
        self._version = version
        self._limit = limit
        self._say = say
        self.num_restarts = 0

    def attempt(self, act: Callable[[], T]) -> T:
        """Do something with the engines that raises the same error on all ranks, again after each restart.

        Raises what ended `act`, or ended giving a new engine its weights, if no engine has died of it, if none may be
        started again, or if a rank is lost.
        """
        is_restarted = False
        while True:
            try:
                if is_restarted:  # in here, because the new engine may die of it as well
                    # Errors hold the store of a rendezvous that failed, in cycles, and the store a thread that waits in
                    # gloo: one that waits until Python ends would abort the process.
                    gc_collect_all()
                    self._sync.reconnect()
                    self._sync.push(self._version())
                    is_restarted = False
                return act()
            except RankLostError:
                raise
            except (EngineError, SyncError) as error:
                if self.num_restarts >= self._limit or not self._restarted():
                    raise
                first_line = str(error).splitlines()[0]
                self._say(f"an engine died and was started again ({self.num_restarts} of {self._limit}): {first_line}")
                self._rollouts.forget()
                is_restarted = True

    def _restarted(self) -> bool:
        """Whether an engine had died, on whichever rank, and lives again. Raises `EngineError` if it does not start."""
        names = self._distributed.together(self._engines.restart_dead)
        is_restarted = any(self._distributed.gather_bytes(", ".join(names).encode()))
        self.num_restarts += is_restarted
        return is_restarted
