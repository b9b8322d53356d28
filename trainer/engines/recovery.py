"""Recovery from dead engines: send the weights to those that are there again, and repeat the work.

The run's own engines (`rollout.engine=embedded` or `colocated`) are restarted, at most `rollout.engine_restarts` times.
Servers are not started here: while one is left, the others are not missed (`rollout/server/server_roster.py`); without
any, the run waits up to `rollout.pool_timeout_s` for one. An engine samples only after its weights are verified
(`WeightSync.push`); dying during that counts as another death. Requests in flight are dropped and their prompts sampled
again with the same seeds, so recovery does not change the result of a run.
"""

from __future__ import annotations

import json
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

LOOK_EVERY_S = 1.0
"""Interval at which a run without any server looks for one [s]."""


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
                    must_push = False
                return act()
            except RankLostError:
                raise
            except EngineLostError as error:
                self._wait_for_server(error)
                self.rollouts.forget()
                must_push = True
            except (EngineError, SyncError) as error:
                if self.num_restarts >= self.limit or not self._restarted():
                    raise
                first_line = str(error).splitlines()[0]
                self.say(f"an engine died and was started again ({self.num_restarts} of {self.limit}): {first_line}")
                self.rollouts.forget()
                is_restarted = must_push = True

    def _wait_for_server(self, error: EngineLostError) -> None:
        """Wait until a server serves or is ready to join. Raises `EngineLostError` on all ranks after the limit."""
        began, is_told = time.monotonic(), False
        while True:
            own = [self.engines.has_engine, time.monotonic() - began >= self.pool_timeout_s]
            by_rank = [json.loads(one) for one in self.distributed.gather_bytes(json.dumps(own).encode())]
            if any(has_engine for has_engine, _ in by_rank):
                return
            if by_rank[0][1]:  # by the clock of rank 0
                raise EngineLostError(
                    f"{error}; none of rollout.urls was ready within rollout.pool_timeout_s={self.pool_timeout_s:g}; "
                    "read their logs, restart them, and resume from the last checkpoint"
                )
            if not is_told:
                self.say(f"{error}; waiting up to {self.pool_timeout_s:g} s for a server of rollout.urls")
                is_told = True
            time.sleep(LOOK_EVERY_S)

    def _restarted(self) -> bool:
        """Restart dead engines on all ranks; True if any was. Raises `EngineError` if one does not start."""
        names = self.distributed.together(self.engines.restart_dead)
        is_restarted = any(self.distributed.gather_bytes(", ".join(names).encode()))
        self.num_restarts += is_restarted
        return is_restarted
