"""An update whose loss reports a metric in some places only: every rank must end with the same sentence.

Started by tests/integration/test_uneven_metrics.py, by itself or by `accelerate launch`:

    uneven_metrics.py MODEL_DIR DIRECTORY

Writes DIRECTORY/rank<N>.json: the sentence by place, and the metrics of an even update after them.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
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
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.objective.losses.inputs import LossInputs, LossOutputs
from lockstep.trainer.update.updater import Updater
from tests.integration.workers.gradients import GradientsOnly, fixed_rollouts


def main(model_dir: str, directory: str) -> None:
    distributed = GradientsOnly.start(dtype="float32", max_grad_norm=1.0)
    policy = Policy.from_pretrained(model_dir)
    module = distributed.prepare(policy, torch.optim.SGD(policy.parameters(), lr=1.0))
    config = Config(
        algorithm=AlgorithmConfig(loss="reinforce"), correction=CorrectionConfig(mode="off"), token_budget=48
    )
    updater = Updater(module, distributed, config)
    batch = dealt(StepBatch.of(fixed_rollouts(), mask_truncated=False), distributed)
    old = Recomputed(updater.scorer.score(batch))
    targets, _ = rollout_targets(
        batch, Logprobs(old=old), StepCorrection.of(batch, old, config.correction), config.algorithm
    )
    plain_loss = updater.loss.function
    calls = 0

    def update(is_reported: Callable[[int], bool]) -> dict[str, float]:
        nonlocal calls
        calls = 0

        def loss(inputs: LossInputs) -> LossOutputs:
            nonlocal calls
            calls += 1
            outputs = plain_loss(inputs)
            own = {"policy/mine": inputs.logp_T.detach().sum()} if is_reported(calls) else {}
            return replace(outputs, metrics={**outputs.metrics, **own})

        updater.loss.function = loss
        return dict(updater.update(batch, targets).metrics)

    def sentence(is_reported: Callable[[int], bool]) -> str:
        try:
            update(is_reported)
        except TrainingError as error:
            module.zero_grad()
            return str(error)
        return ""

    last = distributed.rank == distributed.world_size - 1
    report = {
        "last rank": sentence(lambda call: last),
        "first microbatch": sentence(lambda call: call == 1),
        "first microbatch of the last rank": sentence(lambda call: not last or call == 1),
    }
    module.zero_grad()
    even = {name: value for name, value in update(lambda call: True).items() if name.startswith("policy/")}
    (Path(directory) / f"rank{distributed.rank}.json").write_text(json.dumps(report | {"even": even}))
    distributed.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
