"""Back-propagate one fixed batch with demonstrations and write the gradients instead of stepping.

Started by tests/integration/test_component_gradients.py, by itself or by `accelerate launch`:

    component_gradients.py MODEL_DIR OUT.npz TOKEN_BUDGET [alone] [taught] [lora] [experts]

alone: the demonstrations without rollouts. taught: half of their loss is a divergence from a teacher. lora: of adapters
that are not zero. experts: the model is a mixture of experts, and losses about its routers are added.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from lockstep.rollout.records import Rollout, TrainingRow
from lockstep.trainer.batch.dealt_batch import dealt
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.config.groups.correction_settings import CorrectionConfig
from lockstep.trainer.config.groups.model_settings import LoraConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.credit.correction import StepCorrection
from lockstep.trainer.credit.old_policy import Recomputed
from lockstep.trainer.credit.targets import Logprobs, rollout_targets
from lockstep.trainer.data.demonstrations import Demonstration, Tokenized
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.sft.demonstration_rows import Demonstrations
from lockstep.trainer.update.updater import Updater
from tests.fixtures.adapted import perturb_adapters
from tests.fixtures.models import VOCAB_SIZE
from tests.fixtures.teachers import made_up_scores
from tests.integration.workers.gradients import ROUTER_LOSSES, GradientsOnly, fixed_rollouts

COUNT = 5
"""Demonstrations of a step: not a multiple of the ranks, and fewer tokens than the rollouts."""


def fixed_demonstrations() -> list[Demonstration]:
    """Make demonstrations of unequal lengths and masks."""
    rng = np.random.default_rng(7)
    made = []
    for number in range(COUNT):
        length = int(rng.integers(6, 40))
        mask = rng.random(length) < 0.5
        mask[0], mask[-1] = False, True
        row = TrainingRow(
            ids=rng.integers(5, 200, length),
            loss_mask=mask,
            sampling_logprobs=np.zeros(length, dtype=np.float32),
            versions=np.full(length, -1, dtype=np.int32),
            turns=np.where(mask, 0, -1).astype(np.int32),
            rollout_id=number,
        )
        made.append((Tokenized.of(row),))
    return made


class MadeUpTeacher:
    """A teacher of the rows of rank 0."""

    measured: dict[str, float] = {}  # noqa: RUF012  # stays empty

    def scored(self, batch: StepBatch, rollouts: Sequence[Rollout]) -> StepBatch:
        return replace(batch, teacher=made_up_scores(batch, top_k=4, vocab_size=VOCAB_SIZE)) if batch.rows else batch


def main(model_dir: str, out: str, token_budget: str, *flags: str) -> None:
    distributed = GradientsOnly.start(dtype="float32", max_grad_norm=0.0)
    torch.manual_seed(0)
    policy = Policy.from_pretrained(model_dir, lora=LoraConfig(rank=4, alpha=8) if "lora" in flags else None)
    if "lora" in flags:
        perturb_adapters(policy, seed=0)
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    module = distributed.prepare(policy, torch.optim.SGD(trained, lr=1.0))
    trains_on = "demonstrations" if "alone" in flags else "rollouts"
    algorithm = AlgorithmConfig(loss="reinforce", trains_on=trains_on, **(ROUTER_LOSSES if "experts" in flags else {}))
    config = Config(algorithm=algorithm, token_budget=int(token_budget))
    config.rollout.temperature = 0.7
    config.demonstrations.path, config.demonstrations.rows_per_update = "given", COUNT
    config.demonstrations.weight = 0.5
    teacher = None
    if "taught" in flags:
        config.demonstrations.teacher_divergence, config.demonstrations.teacher_share = "forward", 0.5
        teacher = MadeUpTeacher()
    data = [fixed_demonstrations()] if distributed.is_main else None
    given = Demonstrations(config, distributed, data, teacher=teacher)  # type: ignore[arg-type]
    updater = Updater(module, distributed, config, given=[given])
    batch = dealt(StepBatch.of([] if "alone" in flags else fixed_rollouts(), mask_truncated=False), distributed)
    old = Recomputed(updater.scorer.score(batch))
    correction = StepCorrection.of(batch, old, CorrectionConfig(mode="token_truncate"))
    targets, _ = rollout_targets(batch, Logprobs(old=old), correction, config.algorithm)
    metrics = dict(updater.update(batch, targets).metrics)
    result = dict(distributed.gradients)
    result |= {f"metrics/{name}": np.array(value) for name, value in metrics.items() if name.startswith("loss/")}
    result["microbatches"] = np.array(metrics["perf/microbatches"])
    if distributed.is_main:
        np.savez(out, **result)
    distributed.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
