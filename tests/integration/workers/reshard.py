"""Resume from the checkpoint of other ranks, and save it as loaded and after two more updates.

Started by tests/integration/test_reshard.py, by itself or by `accelerate launch`:

    reshard.py OPTIMIZER OUT [CHECKPOINT [WEIGHT_DECAY]]

Saves OUT/checkpoints/step-3 as it was loaded (without CHECKPOINT: after three updates), step-5 two updates later, and
the final weight decays of the optimizer in OUT/decays.json.
"""

import json
import sys
from pathlib import Path

import torch
from torch import nn

from lockstep.trainer.checkpoint import checkpoint, stored
from lockstep.trainer.checkpoint.checkpoint import TrainerState
from lockstep.trainer.config.groups.optimizer_settings import OptimizerConfig
from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.update.optimizers.optimizer import make_optimizer


def layers() -> nn.Module:
    """A model with sizes that no number of ranks divides and a parameter smaller than the number of ranks."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 1))
    module[0].bias.requires_grad_(False)
    return module


def main(optimizer_name: str, out: str, source: str = "", weight_decay: str = "0.1") -> None:
    distributed = Distributed.start(dtype="float32", max_grad_norm=1.0)
    module = layers()
    settings = OptimizerConfig(name=optimizer_name, weight_decay=float(weight_decay))
    optimizer = make_optimizer(module, settings, is_sharded=distributed.zero_stage > 0)
    prepared = distributed.prepare(module, optimizer)
    inputs = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    mine = inputs[distributed.rank :: distributed.world_size]

    def updates(count: int) -> None:
        for _ in range(count):
            with distributed.accumulate(is_last=True) as backward:  # the mean over ranks equals that over all inputs
                backward(prepared(mine).square().sum() * distributed.world_size / len(inputs))
            distributed.step(0.05, distributed.gradient_norm())

    def save(update: int) -> None:
        state = TrainerState(step=update, update=update, data_cursor=0)
        checkpoint.save(Path(out) / "checkpoints", state, distributed, keep=9)

    if source:
        stored.load(Path(source), distributed)
    else:
        updates(3)
    save(3)
    updates(2)
    save(5)
    decays = sorted(group["weight_decay"] for group in distributed._optimizer.param_groups)
    if distributed.is_main:
        (Path(out) / "decays.json").write_text(json.dumps(decays))
    distributed.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
