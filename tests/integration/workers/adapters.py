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

from trainer.batch.step_batch import decode, encode
from trainer.config.schema import AlgorithmConfig, Config, LoraConfig, OptimizerConfig
from trainer.credit.targets import Logprobs, Targets, token_advantages
from trainer.model.lora import save_merged
from trainer.model.policy import Policy
from trainer.objective.correction import correction_weights
from trainer.update.optimizer import make_optimizer
from trainer.update.updater import Updater


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
    mine = [rollout for rollout in fixed_rollouts() if rollout.rollout_id % distributed.world_size == distributed.rank]
    batch = decode(distributed.gather_bytes(encode(mine, mask_truncated=False)))
    config = Config(algorithm=AlgorithmConfig(entropy_coef=0.01), token_budget=48)
    updater = Updater(module, distributed, config)
    logprobs = Logprobs(old_N=updater.scorer.score(batch), ref_N=None)
    weights = correction_weights(
        logprobs.old_N, batch.sampling_logprobs_N, batch.rollout_N, batch.num_rollouts, mode="off"
    )
    advantages_N, _ = token_advantages(batch, logprobs, config)
    updater.update(batch, Targets.of(batch, advantages_N, logprobs, weights))
    assert isinstance(policy.model, PeftModel)
    save_merged(policy.model, Path(out_dir) / "model", distributed)
    if distributed.is_main:
        np.savez(Path(out_dir) / "gradients.npz", scored=logprobs.old_N.numpy(), **distributed.gradients)
    distributed.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
