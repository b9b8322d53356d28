"""Average the policy over updates on real ranks, and save and resume the average.

Started by tests/integration/test_weight_average.py, by itself or by `accelerate launch`:

    weight_average.py OUT [CHECKPOINT]

Makes three updates with an advance after each, or loads CHECKPOINT; saves OUT/checkpoints/step-3, makes two more and
saves step-5. Rank 0 writes OUT/seen.json: parameters and outputs with the policy, with the average, and afterwards.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from lockstep.rollout.weights.source import ZeroSource
from lockstep.trainer.checkpoint import checkpoint, stored
from lockstep.trainer.checkpoint.checkpoint import TrainerState
from lockstep.trainer.config.groups.optimizer_settings import OptimizerConfig
from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.distributed.weight_average import WeightAverage
from lockstep.trainer.update.optimizers.optimizer import make_optimizer
from tests.integration.workers.reshard import layers

DECAY = 0.75


def main(out: str, source: str = "") -> None:
    distributed = Distributed.start(dtype="float32", max_grad_norm=1.0)
    module = layers()
    optimizer = make_optimizer(module, OptimizerConfig(name="adamw"), is_sharded=distributed.zero_stage > 0)
    prepared = distributed.prepare(module, optimizer)
    average = WeightAverage(distributed, decay=DECAY)
    inputs = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    mine = inputs[distributed.rank :: distributed.world_size]
    seen: list[dict[str, Any]] = []

    def outputs() -> list[float]:
        with torch.no_grad():
            return prepared(inputs).flatten().tolist()

    def read() -> dict[str, list[float]]:
        """Return the trained parameters as the weight sync reads them; a collective."""
        return {name: value.flatten().tolist() for name, value in ZeroSource(prepared) if name != "0.bias"}

    def note() -> None:
        policy = {"policy": read(), "policy_outputs": outputs()}
        with average.installed():
            averaged = {"average": read(), "average_outputs": outputs()}
        after = {"policy_after": read(), "policy_outputs_after": outputs()}
        seen.append(policy | averaged | after)

    def updates(count: int) -> None:
        for _ in range(count):
            with distributed.accumulate(is_last=True) as backward:  # the mean over ranks equals that over all inputs
                backward(prepared(mine).square().sum() * distributed.world_size / len(inputs))
            distributed.step(0.05, distributed.gradient_norm())
            average.advance()
            note()

    def save(update: int) -> None:
        state = TrainerState(step=update, update=update, data_cursor=0)
        checkpoint.save(Path(out) / "checkpoints", state, distributed, keep=9, also=average.save)

    note()
    if source:
        stored.load(Path(source), distributed)
        assert average.load(Path(source))
        note()
    else:
        updates(3)
    save(3)
    updates(2)
    save(5)
    if distributed.is_main:
        (Path(out) / "seen.json").write_text(json.dumps(seen))
    distributed.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
