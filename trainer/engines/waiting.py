"""Waiting of a run that has lost all its servers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from lockstep.rollout.errors import EngineLostError
from lockstep.trainer.distributed.distributed import Distributed

LOOK_EVERY_S = 1.0
"""Interval at which a server is looked for [s]."""


def wait_for_server(
    distributed: Distributed,
    has_engine: Callable[[], bool],
    error: EngineLostError,
    *,
    until: float,
    timeout_s: float,
    say: Callable[[str], None],
) -> None:
    """Wait until a server of any rank serves or is ready to join; a collective.

    error: with which the last one was lost. until: end of the wait by `time.monotonic`, also for servers that answer
    but get no weights. timeout_s: the whole wait. Raises `EngineLostError` on all ranks then.
    """
    is_told = False
    while True:
        own = [has_engine(), time.monotonic() >= until]
        by_rank = [json.loads(one) for one in distributed.gather_bytes(json.dumps(own).encode())]
        if by_rank[0][1]:  # by the clock of rank 0
            raise EngineLostError(
                f"{error}; none of rollout.urls got the weights within rollout.pool_timeout_s={timeout_s:g}; read "
                "their logs, restart them, and resume from the last checkpoint"
            )
        if any(is_there for is_there, _ in by_rank):
            return
        if not is_told:
            say(f"{error}; waiting up to {timeout_s:g} s for a server of rollout.urls")
            is_told = True
        time.sleep(LOOK_EVERY_S)
