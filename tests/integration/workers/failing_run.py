"""scripts/train.py with a fault in its second update: failing_run.py FAULT SETTINGS...

gathered    rank 1 fails in the gather of a weight sync, after the exchange
absent      rank 1 fails before the exchange, so that the other rank waits in it
producer    rank 0 fails in a group of rollouts that is made ahead
memory      rank 1 runs out of memory in a forward pass, in which the other rank waits for it
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from lockstep.rollout.errors import EngineError
from lockstep.rollout.sampler.sampler import Sampler
from lockstep.rollout.weights.shards import Fetch
from lockstep.rollout.weights.source import ZeroSource
from lockstep.trainer.cli import launch
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.update.updater import Updater

FAILING_PASS = 3
"""Number of syncs before the fault: of the first weights and after the first update."""
FAILING_BUCKET = 2
FAILING_GROUP = 5


def fail_in_gather(*, takes_part: bool) -> None:
    own_parts, begin, wait = ZeroSource.own_parts, Fetch.begin, Fetch.wait
    num_passes, num_begun = 0, 0

    def counted(self: ZeroSource) -> Any:
        nonlocal num_passes, num_begun
        num_passes, num_begun = num_passes + 1, 0
        return own_parts(self)

    def fails() -> bool:
        return num_passes == FAILING_PASS and num_begun == FAILING_BUCKET and os.environ["RANK"] == "1"

    def failing_begin(self: Fetch, values: Any) -> None:
        nonlocal num_begun
        num_begun += 1
        if fails() and not takes_part:
            raise MemoryError("no memory for another bucket")
        begin(self, values)

    def failing_wait(self: Fetch) -> None:
        nonlocal takes_part
        wait(self)
        if fails() and takes_part:
            takes_part = False  # once, because it joins the remaining exchanges afterwards
            raise MemoryError("no memory for another bucket")

    ZeroSource.own_parts, Fetch.begin, Fetch.wait = counted, failing_begin, failing_wait  # type: ignore[method-assign]


def fail_in_producer() -> None:
    collect = Sampler.collect

    async def failing(self: Sampler, *arguments: Any, group_ids: Any, **settings: Any) -> Any:
        if FAILING_GROUP in group_ids:
            raise EngineError("out of luck with another group")
        return await collect(self, *arguments, group_ids=group_ids, **settings)

    Sampler.collect = failing  # type: ignore[method-assign]


def fail_in_forward() -> None:
    optimizer_step, forward = Updater.optimizer_step, Policy.forward
    num_updates = 0

    def counted(self: Updater, *arguments: Any, **settings: Any) -> Any:
        nonlocal num_updates
        num_updates += 1
        return optimizer_step(self, *arguments, **settings)

    def failing(self: Policy, *arguments: Any, **settings: Any) -> Any:
        if num_updates == 2 and torch.is_grad_enabled() and os.environ["RANK"] == "1":
            raise torch.OutOfMemoryError("CUDA out of memory (injected)")
        return forward(self, *arguments, **settings)

    Updater.optimizer_step, Policy.forward = counted, failing  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[], None]] = {
    "gathered": lambda: fail_in_gather(takes_part=True),
    "absent": lambda: fail_in_gather(takes_part=False),
    "producer": fail_in_producer,
    "memory": fail_in_forward,
}


def main(config: Any) -> None:
    from lockstep.trainer.run.run import run

    run(config)


if __name__ == "__main__":
    FAULTS[sys.argv.pop(1)]()
    launch(main)
