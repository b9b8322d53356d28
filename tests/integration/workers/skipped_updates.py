"""Two updates, and the same two with broken ones between: both must end with equal parameters and moments.

Started by tests/integration/test_skipped_updates.py, by itself or by `accelerate launch`:

    skipped_updates.py MODEL_DIR DIRECTORY

Updates are broken on the last rank only. Writes DIRECTORY/report.json.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from lockstep.rollout.errors import TrainingError
from lockstep.trainer.batch.dealt_batch import dealt
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.config.groups.correction_settings import CorrectionConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.credit.correction import StepCorrection
from lockstep.trainer.credit.old_policy import Recomputed
from lockstep.trainer.credit.targets import Logprobs, rollout_targets
from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.objective.losses.inputs import LossInputs, LossOutputs
from lockstep.trainer.update.batch_dumps import write_dump
from lockstep.trainer.update.updater import Updater
from tests.integration.workers.gradients import fixed_rollouts


class Amplified(torch.autograd.Function):
    """Return the same value with its gradient multiplied by `factor`."""

    @staticmethod
    def forward(ctx, value, factor):
        ctx.factor = factor
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


def main(model_dir: str, directory: str) -> None:
    root = Path(directory)
    distributed = Distributed.start(dtype="float32", max_grad_norm=1.0)
    policy = Policy.from_pretrained(model_dir)
    module = distributed.prepare(policy, torch.optim.AdamW(policy.parameters(), lr=1e-3))
    config = Config(
        algorithm=AlgorithmConfig(loss="reinforce"), correction=CorrectionConfig(mode="off"), token_budget=48
    )
    config.optimizer.lr, config.optimizer.spike, config.optimizer.max_skipped_updates = 1e-3, "skip", 4
    updater = Updater(module, distributed, config)
    batch = dealt(StepBatch.of(fixed_rollouts(), mask_truncated=False), distributed)
    old = Recomputed(updater.scorer.score(batch))
    targets, _ = rollout_targets(
        batch, Logprobs(old=old), StepCorrection.of(batch, old, config.correction), config.algorithm
    )
    plain_loss = updater.loss.function

    def update(*, loss_factor: float = 1.0, gradient_factor: float = 1.0) -> Mapping[str, float]:
        def loss(inputs: LossInputs) -> LossOutputs:
            outputs = plain_loss(inputs)
            if distributed.rank < distributed.world_size - 1:
                return outputs
            return replace(outputs, loss_T=Amplified.apply(outputs.loss_T * loss_factor, gradient_factor))

        updater.loss.function = loss
        return updater.update(batch, targets).metrics

    def parameters() -> torch.Tensor:
        with distributed.whole_parameters(distributed.unwrapped):
            return torch.cat([p.detach().flatten().clone() for p in distributed.unwrapped.parameters()])

    (root / "begin").mkdir(exist_ok=True)
    distributed.barrier()
    distributed.save_state(root / "begin")
    distributed.barrier()
    norms = [update()["optim/grad_norm"] for _ in range(2)]
    expected = parameters()

    distributed.load_state(root / "begin")
    updater.num_updates = 0
    if distributed.is_main:
        updater.dump = partial(write_dump, root / "dumps")
    seen = [update()]
    after_first = parameters()
    seen.append(update(loss_factor=float("nan")))
    seen.append(update(gradient_factor=float("inf")))
    updater.guard.norms.extend([norms[0]] * 8)
    seen.append(update(gradient_factor=1e6))
    kept = torch.equal(parameters(), after_first)
    version_after_skips = updater.num_updates
    seen.append(update())
    report = {
        "skipped updates change nothing": kept,
        "later updates are equal to those without them": torch.equal(parameters(), expected),
        "grad_norms": [norms[0], norms[1], seen[0]["optim/grad_norm"], seen[-1]["optim/grad_norm"]],
        "spike_norm": seen[3]["optim/grad_norm"],
        "versions": [version_after_skips, updater.num_updates],
        "counted": [metrics["health/skipped_updates"] for metrics in seen],
    }
    ended = ""
    try:
        for _ in range(4):
            update(loss_factor=float("nan"))
    except TrainingError as error:
        ended = str(error)
    report["ended"] = [message.decode() for message in distributed.gather_bytes(ended.encode())]
    if distributed.is_main:
        (root / "report.json").write_text(json.dumps(report))
    distributed.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
