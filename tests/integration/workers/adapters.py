"""Gradient of adapters that are not zero, and the saved model with them merged.

Started by tests/integration/test_memory_paths.py, by itself or by `accelerate launch`:

    adapters.py MODEL_DIR OUT_DIR DTYPE
"""

import sys
from pathlib import Path

import numpy as np
import torch
from gradients import GradientsOnly, fixed_rollouts  # type: ignore[import-not-found]  # beside this file
from peft import PeftModel

from lockstep.trainer.batch.dealt_batch import dealt
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.config.groups.correction_settings import CorrectionConfig
from lockstep.trainer.config.groups.model_settings import LoraConfig
from lockstep.trainer.config.groups.optimizer_settings import OptimizerConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.credit.correction import StepCorrection
from lockstep.trainer.credit.old_policy import Recomputed
from lockstep.trainer.credit.targets import Logprobs, rollout_targets
from lockstep.trainer.model.lora import save_adapted
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.update.optimizers.optimizer import make_optimizer
from lockstep.trainer.update.updater import Updater


def main(model_dir: str, out_dir: str, dtype: str) -> None:
    distributed = GradientsOnly.start(dtype=dtype, max_grad_norm=0.0)
    policy = Policy.from_pretrained(
        model_dir, gradient_checkpointing=True, compute_dtype=dtype, lora=LoraConfig(rank=4, alpha=8)
    )
    generator = torch.Generator().manual_seed(0)
    for name, parameter in policy.named_parameters():
        if "lora_" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    module = distributed.prepare(policy, make_optimizer(policy, OptimizerConfig(), is_sharded=True))
    batch = dealt(StepBatch.of(fixed_rollouts(), mask_truncated=False), distributed)
    config = Config(
        algorithm=AlgorithmConfig(entropy_coef=0.01), correction=CorrectionConfig(mode="off"), token_budget=48
    )
    updater = Updater(module, distributed, config)
    scored_N = updater.scorer.score(batch)
    old = Recomputed(scored_N)
    correction = StepCorrection.of(batch, old, config.correction)
    targets, _ = rollout_targets(batch, Logprobs(old=old), correction, config.algorithm)
    updater.update(batch, targets)
    assert isinstance(policy.model, PeftModel)
    save_adapted(policy.model, Path(out_dir) / "model", distributed)
    if distributed.is_main:
        np.savez(Path(out_dir) / "gradients.npz", scored=scored_N.numpy(), **distributed.gradients)
    distributed.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
