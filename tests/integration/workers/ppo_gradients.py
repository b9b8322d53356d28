"""Back-propagate one fixed batch of PPO with policy and critic in one module, and write gradients and critic.

Started by tests/integration/test_ppo_gradients.py, by itself or by `accelerate launch`:

    ppo_gradients.py MODEL_DIR OUT.npz separate|shared|vapo TOKEN_BUDGET [checkpointing] [apart]

vapo: a separate critic, with λ by length and another λ for the values.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch

from lockstep.trainer.batch.dealt_batch import dealt
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.config.groups.correction_settings import CorrectionConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.credit.correction import StepCorrection
from lockstep.trainer.credit.critic_credit import critic_targets
from lockstep.trainer.credit.old_policy import Recomputed
from lockstep.trainer.credit.targets import Logprobs
from lockstep.trainer.model.critic import ActorCritic, ValueHead, save_critic, with_critic
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.update.updater import Updater
from tests.integration.workers.gradients import GradientsOnly, count_runs, fixed_rollouts


def main(model_dir: str, out: str, critic: str, token_budget: str, *flags: str) -> None:
    checkpointing = "checkpointing" in flags
    distributed = GradientsOnly.start(dtype="float32", max_grad_norm=0.0)
    torch.manual_seed(0)
    algorithm = AlgorithmConfig(
        advantage="gae", clip_low=0.05, clip_high=0.1, kl_coef=0.1, kl_place="reward", whiten_rewards=True,
        entropy_coef=0.01, value_coef=0.3, value_clip=0.2, kl_target=0.5, kl_horizon=100,
    )  # fmt: skip
    if critic == "vapo":
        algorithm.gae_length_alpha, algorithm.critic_lambda, critic = 0.2, 1.0, "separate"
    config = Config(algorithm=algorithm, token_budget=int(token_budget))
    config.model.path, config.model.critic = model_dir, critic
    config.share_prefixes = "never" if "apart" in flags else "auto"
    config.model.gradient_checkpointing = checkpointing
    policy = Policy.from_pretrained(model_dir, gradient_checkpointing=checkpointing)
    module = with_critic(policy, config.model, has_critic=True, engine_context=None)
    assert isinstance(module, ActorCritic)
    trunk = module.policy.causal_lm.get_decoder() if critic == "shared" else module.critic.get_submodule("decoder")
    runs = count_runs({"pack": module, "layer": trunk.get_submodule("layers.0")})
    head = module.critic if isinstance(module.critic, ValueHead) else module.critic.head
    torch.nn.init.normal_(head.linear.weight, std=0.3, generator=torch.Generator().manual_seed(1))
    prepared = distributed.prepare(module, torch.optim.SGD(module.parameters(), lr=1.0))

    batch = dealt(StepBatch.of(fixed_rollouts(), mask_truncated=False), distributed)
    updater = Updater(prepared, distributed, config)
    scored, values, _ = updater.scorer.score_with(batch, values=True)
    # Off-policy on purpose: ratios and values must have moved, or clipping would not be seen.
    noise = torch.from_numpy(np.random.default_rng(1).normal(size=(3, len(scored)))).float()
    old = Recomputed(scored + 0.15 * noise[0])
    logprobs = Logprobs(old=old, ref_N=scored + 0.2 * noise[1], values_N=values + 0.3 * noise[2])
    correction = StepCorrection.of(batch, old, CorrectionConfig(mode="token_truncate"))
    assigned = critic_targets(batch, logprobs, correction, algorithm, kl_coef=0.1)
    metrics = updater.update(batch, assigned.targets).metrics
    shared = {"kl_coef": assigned.next_kl_coef, "lr": metrics["optim/lr"], **assigned.metrics}
    assert len(set(distributed.gather_bytes(json.dumps(shared).encode()))) == 1, "ranks differ in what they share"
    assert save_critic(module, Path(out).with_suffix(""), distributed)
    if distributed.is_main:
        numbers = {name: np.array(value) for name, value in metrics.items() if name.startswith(("ppo/", "policy/"))}
        numbers["layer_runs_per_pack"] = np.array(runs["layer"] / runs["pack"])
        np.savez(out, **distributed.gradients, **numbers, scored=scored.numpy(), values=values.numpy())
    distributed.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
