"""Runs hostile reward functions in worker processes as the user of this process, and prints the results as JSON.

    python -m tests.hostile.run_functions NAME...

A well-behaved function follows each in the same worker. At the end this looks for survivors (`run_programs.py`).
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict

from lockstep.rewards.meter import Meter
from lockstep.rewards.workers.pool import Isolation, WorkerPool
from tests.hostile.cases import HERE, Case, cases
from tests.hostile.run_programs import PR_SET_CHILD_SUBREAPER, libc, survivors
from tests.unit.rewards.workers.test_pool import rollout

TIMEOUT_S = 3.0


def main() -> None:
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    pool = WorkerPool(Isolation(workers=1, memory_gib=2.0))
    found: dict[str, object] = {name: asyncio.run(result(cases("functions")[name], pool)) for name in sys.argv[1:]}
    pool.close()
    print(json.dumps({**found, "survivors": survivors()}))


async def result(case: Case, pool: WorkerPool) -> dict[str, object]:
    """Return the verdicts on a hostile function and on two calls of a well-behaved one after it."""
    hostile, good = (pool.load(f"{path}:score", {}) for path in (case.path, HERE / "well_behaved.py"))
    started = time.monotonic()
    (verdict,) = await hostile.judge([rollout()], Meter(), timeout_s=TIMEOUT_S)
    took_s = time.monotonic() - started
    after = await good.judge([rollout(), rollout()], Meter(), timeout_s=20.0)
    return {"verdict": asdict(verdict), "after": [asdict(one) for one in after], "took_s": took_s}


if __name__ == "__main__":
    main()
