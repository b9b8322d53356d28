"""PyTorch's Adam moves a policy further than TensorFlow's on one recorded batch ("The N Implementation Details of RLHF
with PPO", Hugging Face blog, 2023)."""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from lockstep.trainer.batch.packing import collate
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.objective.losses.inputs import LossInputs
from lockstep.trainer.objective.losses.ppo_clip import ppo_clip
from lockstep.trainer.update.optimizers.tf_adam import TFAdamW
from tests.unit.trainer.model.test_critic import ROWS

EPSILON, LR, EPOCHS = 1e-5, 1e-4, 2


def ratios_after_training(optimizer_class) -> torch.Tensor:
    """Return (T,) π_new / π_old of the batch after two epochs of four minibatches."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=512, n_positions=64)
    policy = Policy(GPT2LMHeadModel(config))
    packs = [collate(ROWS, [index]) for index in range(len(ROWS))]
    whole = collate(ROWS, range(len(ROWS)))
    with torch.no_grad():
        old_T, _ = policy(whole, temperature=0.7)
        old = [policy(pack, temperature=0.7)[0] for pack in packs]
    generator = torch.Generator().manual_seed(1)
    advantages = [torch.randn(len(pack.target_ids_T), generator=generator) for pack in packs]
    optimizer = optimizer_class(
        [{"params": list(policy.parameters())}], lr=LR, betas=(0.9, 0.999), eps=EPSILON, weight_decay=0.0
    )
    for _ in range(EPOCHS):
        for pack, old_logp_T, advantages_T in zip(packs, old, advantages, strict=True):
            logp_T, _ = policy(pack, temperature=0.7)
            inputs = LossInputs(
                logp_T=logp_T,
                old_logp_T=old_logp_T,
                advantages_T=advantages_T,
                rollout_T=torch.zeros(len(logp_T), dtype=torch.int64),
                num_rollouts=1,
            )
            loss = ppo_clip(inputs, clip_low=0.2, clip_high=0.2, dual_clip=None).loss_T.mean()
            optimizer.zero_grad()
            (loss * 1e-2).backward()  # gradients as small as those of a large batch, where epsilon matters
            optimizer.step()
    with torch.no_grad():
        return (policy(whole, temperature=0.7)[0] - old_T).exp()


def test_torchs_adam_moves_the_policy_further_than_tensorflows():
    torchs, tensorflows = ratios_after_training(torch.optim.AdamW), ratios_after_training(TFAdamW)
    assert torchs.var() > 2 * tensorflows.var(), (torchs.var(), tensorflows.var())
    assert torchs.max() > tensorflows.max() > 1
    assert torchs.min() < tensorflows.min() < 1
