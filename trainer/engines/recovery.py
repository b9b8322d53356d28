"""Recovery from dead engines: send the weights to those that are there again, and repeat the work.

The run's own engines (`rollout.engine=embedded` or `colocated`) are restarted, at most `rollout.engine_restarts` times.
Servers are not started here: while one is left, the others are not missed (`rollout/server/server_roster.py`); without
any, the run waits up to `rollout.pool_timeout_s` for one. An engine samples only after its weights are verified
(`WeightSync.push`); dying during that counts as another death. Requests in flight are dropped and their prompts sampled
again with the same seeds, so recovery does not change the result of a run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from lockstep.rollout.errors import EngineError, EngineLostError, RankLostError, SyncError
from lockstep.rollout.system.gc_freeze import gc_collect_all
from lockstep.rollout.weights.sync import WeightSync
from lockstep.trainer.collect.source import RolloutSource
from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.engines.run_engines import Engines

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class Recovery:
    """Retry loop around work with the engines; all ranks call it together."""

    engines: Engines
    distributed: Distributed
    rollouts: RolloutSource
    sync: WeightSync
    version: Callable[[], int]
    """Returns the current weight version."""
    limit: int
    """Maximal number of restarts of this process."""
    pool_timeout_s: float
    """Time without any server after which the run ends."""
    say: Callable[[str], None]
    num_restarts: int = 0

    def attempt(self, act: Callable[[], T]) -> T:
        """Call `act`, which must raise the same error on all ranks, and repeat it after each restart.

        Raises the error of `act`, or of sending weights to a new engine, if no engine died, at the limit, or if a rank
        is lost.
        """
        is_restarted = must_push = False
        lost_at: float | None = None
        """Time at which the last server was lost; None while one has the weights."""
        while True:
            try:
                if is_restarted:  # inside the try, because this may kill the new engine too
                    # Errors hold, in cycles, the store of a failed rendezvous, whose thread waits in gloo and would
                    # abort the process when Python exits.
                    gc_collect_all()
                    self.sync.reconnect()
                    is_restarted = False
                if must_push:
                    self.sync.push(self.version())
                    must_push, lost_at = False, None
                return act()
            except RankLostError:
                raise
            except EngineLostError as error:
                lost_at = time.monotonic() if lost_at is None else lost_at
                from lockstep.trainer.engines.waiting import wait_for_server  # runs without servers do not load it

                wait_for_server(
                    self.distributed,
                    lambda: self.engines.has_engine,
                    error,
                    until=lost_at + self.pool_timeout_s,
                    timeout_s=self.pool_timeout_s,
                    say=self.say,
                )
                self.rollouts.forget()
                must_push = True
            except (EngineError, SyncError) as error:
                if self.num_restarts >= self.limit or not self._restarted():
                    raise
                first_line = str(error).splitlines()[0]
                self.say(f"an engine died and was started again ({self.num_restarts} of {self.limit}): {first_line}")
                self.rollouts.forget()
                is_restarted = must_push = True

    def _restarted(self) -> bool:
        """Restart dead engines on all ranks; True if any was. Raises `EngineError` if one does not start."""
        names = self.distributed.together(self.engines.restart_dead)
        is_restarted = any(self.distributed.gather_bytes(", ".join(names).encode()))
        self.num_restarts += is_restarted
        return is_restarted
