"""One update of policy and critic, after a warm-up of the critic and without one, from the same weights.

Started by tests/integration/test_critic_warmup.py, by itself or by `accelerate launch`:

    critic_warmup.py MODEL_DIR OUT.npz

Writes the movement of the policy by the length of the warm-up.
"""

import sys

import numpy as np
import torch

from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.config.groups.correction_settings import CorrectionConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.credit.correction import StepCorrection
from lockstep.trainer.credit.critic_credit import critic_targets
from lockstep.trainer.credit.old_policy import Recomputed
from lockstep.trainer.credit.targets import Logprobs
from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.model.critic import with_critic
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.update.optimizers.optimizer import make_optimizer
from lockstep.trainer.update.updater import Updater
from tests.integration.workers.gradients import fixed_rollouts


def moved(model_dir: str, distributed: Distributed, warmup: int) -> torch.Tensor:
    algorithm = AlgorithmConfig(advantage="gae", critic_warmup=warmup, epochs=warmup + 1)
    config = Config(algorithm=algorithm)
    config.model.path, config.optimizer.lr = model_dir, 1e-3
    torch.manual_seed(0)
    module = with_critic(Policy.from_pretrained(model_dir), config.model, has_critic=True, engine_context=None)
    optimizer = make_optimizer(module, config.optimizer, is_sharded=distributed.zero_stage > 0)
    prepared = distributed.prepare(module, optimizer)

    def policy() -> torch.Tensor:
        with distributed.whole_parameters(distributed.unwrapped):
            own = distributed.unwrapped.get_submodule("policy").parameters()
            return torch.cat([parameter.detach().flatten().clone() for parameter in own])

    batch = StepBatch.of(fixed_rollouts(), mask_truncated=False)
    updater = Updater(prepared, distributed, config)
    scored, values, _ = updater.scorer.score_with(batch, values=True)
    logprobs = Logprobs(old=Recomputed(scored), values_N=values)
    correction = StepCorrection.of(batch, logprobs.old, CorrectionConfig(mode="off"))
    before = policy()
    updater.update(batch, critic_targets(batch, logprobs, correction, algorithm, kl_coef=0.0).targets)
    assert updater.num_updates == warmup + 1
    return policy() - before


def main(model_dir: str, out: str) -> None:
    distributed = Distributed.start(dtype="float32", max_grad_norm=0.0)
    found = {f"after {warmup}": moved(model_dir, distributed, warmup) for warmup in (0, 6)}
    if distributed.is_main:
        np.savez(out, **{name: tensor.numpy() for name, tensor in found.items()})
    distributed.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
