"""Losses and gradients of one microbatch equal those of TRL's GRPO loss.

TRL takes padded rows with masks, Lockstep flat tokens. TRL's trainer is built without model or data, and its method
that computes logprobs returns those of the test. TRL normalizes within one microbatch of one process, so only one
microbatch can be compared; across microbatches the two differ by design (test_partition_invariance.py).
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.lab.losses.examined_loss import step_values
from lockstep.trainer.objective.advantages import ADVANTAGES
from lockstep.trainer.objective.advantages.inputs import AdvantageInputs, RewardTerms
from lockstep.trainer.objective.kl import kl_term
from lockstep.trainer.objective.loss_normalization import StepCounts, loss_coefficients, normalized_loss
from lockstep.trainer.objective.losses import POLICY_LOSSES
from lockstep.trainer.objective.losses.inputs import LossInputs, StepInputs

grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer", reason="TRL is a peer to compare with, not a dependency")

ROWS, COLUMNS, H = 5, 8, 16


class Batch:
    """Random logprobs of padded rows; the last row is fully masked, and row 1 has a tool result in its middle."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self.logp = -normal(ROWS, COLUMNS).abs() - 0.1
        self.old = self.logp + 0.3 * normal(ROWS, COLUMNS)
        self.ref = self.logp + 0.3 * normal(ROWS, COLUMNS)
        self.ratio = (0.2 * normal(ROWS, COLUMNS)).exp()
        self.advantages = normal(ROWS)
        self.entropy = normal(ROWS, COLUMNS).abs()
        lengths = torch.tensor([8, 7, 3, 1, 0])
        self.mask = torch.arange(COLUMNS) < lengths[:, None]
        self.tool_mask = torch.ones_like(self.mask)
        self.tool_mask[1, 2:4] = False
        self.trained = self.mask & self.tool_mask
        self.ratio[~self.trained] = 1  # TRL's VESPO multiplies those of masked tokens, too

    @property
    def sampling(self) -> Tensor:
        """Logprobs of the engine, of which `ratio` is the correction weight."""
        return self.old - self.ratio.log()


def trl_loss(batch: Batch, **settings: Any) -> tuple[Tensor, Tensor]:
    """Return the loss and its gradient with respect to the padded logprobs."""
    logp = batch.logp.clone().requires_grad_()

    class Peer(grpo_trainer.GRPOTrainer):
        def __init__(self) -> None:
            """Skip model and data."""

        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            return logp, batch.entropy, None

    peer = Peer()
    vars(peer).update(
        {
            "args": SimpleNamespace(
                delta=settings.pop("delta", None),
                use_bias_correction_kl=settings.pop("use_bias_correction_kl", False),
                sapo_temperature_pos=1.0,
                sapo_temperature_neg=1.05,
                vespo_k_pos=2.0,
                vespo_lambda_pos=3.0,
                vespo_k_neg=3.0,
                vespo_lambda_neg=2.0,
                steps_per_generation=1,
            ),
            "accelerator": SimpleNamespace(
                num_processes=1,
                gather=lambda x: x,
                reduce=lambda x, reduction: x,
                pad_across_processes=lambda x, **_: x,
                sync_gradients=True,
            ),
            "model": SimpleNamespace(training=True),
            "current_gradient_accumulation_steps": 1,
            "max_completion_length": H,
            "top_entropy_quantile": 1.0,
            "off_policy_mask_threshold": None,
            "_entropy_bonus_enabled": False,
            "aux_loss_enabled": False,
            "use_vllm": True,
            "vllm_importance_sampling_correction": True,
            "importance_sampling_level": "token",
            "epsilon_low": 0.2,
            "epsilon_high": 0.28,
            "beta": 0.0,
            "_metrics": {"train": defaultdict(list)},
        }
        | settings
    )
    inputs = {
        "prompt_ids": torch.zeros(ROWS, 1, dtype=torch.long),
        "prompt_mask": torch.ones(ROWS, 1),
        "completion_ids": torch.zeros(ROWS, COLUMNS, dtype=torch.long),
        "completion_mask": batch.mask.double(),
        "tool_mask": batch.tool_mask.double(),
        "advantages": batch.advantages,
        "old_per_token_logps": batch.old,
        "ref_per_token_logps": batch.ref,
        "importance_sampling_ratio": batch.ratio,
        "sampling_per_token_logps": batch.sampling,
        "num_items_in_batch": batch.trained.sum(),
    }
    loss = peer._compute_loss(peer.model, inputs)
    return loss.detach(), torch.autograd.grad(loss, logp)[0]


def our_loss(
    batch: Batch, name: str, normalizer: str, *, kl: str | None = None, beta: float = 0.0, **options: Any
) -> tuple[Tensor, Tensor]:
    logp = batch.logp.clone().requires_grad_()
    rollout_T = torch.arange(ROWS)[:, None].expand(ROWS, COLUMNS)[batch.trained]
    logp_T, old_T = logp[batch.trained], batch.old[batch.trained]
    of_step = StepInputs(
        logp_N=logp_T.detach(),
        old_logp_N=old_T,
        sampling_logp_N=batch.sampling[batch.trained],
        advantages_N=batch.advantages[rollout_T],
        rollout_N=rollout_T,
        num_rollouts=ROWS,
        seed=0,
        entropy_N=batch.entropy[batch.trained],
    )
    inputs = LossInputs(
        logp_T=logp_T,
        old_logp_T=old_T,
        advantages_T=batch.advantages[rollout_T],
        rollout_T=rollout_T,
        num_rollouts=ROWS,
        weights_T=batch.ratio[batch.trained],
        sampling_logp_T=of_step.sampling_logp_N,
        step_values=step_values(POLICY_LOSSES[name], of_step, **options),
    )
    loss_T = POLICY_LOSSES[name](inputs, **options).loss_T
    if kl is not None:
        loss_T = loss_T + beta * kl_term(kl, inputs.logp_T, batch.ref[batch.trained], inputs.old_logp_T)
    counts = StepCounts(num_rollouts=ROWS, num_tokens=len(rollout_T), max_completion_length=H)
    coefficient_T = loss_coefficients(normalizer, rollout_T, batch.trained.sum(dim=1), counts, dtype=torch.float64)
    loss = normalized_loss(loss_T, coefficient_T)
    return loss.detach(), torch.autograd.grad(loss, logp)[0]


CLIP = {"clip_low": 0.2, "clip_high": 0.28}
SEQUENCE = {"importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.06}
GSPO = {"clip_low": 0.05, "clip_high": 0.06}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"loss_type": "grpo"}, {"name": "ppo_clip", "normalizer": "grpo", **CLIP}),
        ({"loss_type": "bnpo"}, {"name": "ppo_clip", "normalizer": "token", **CLIP}),
        ({"loss_type": "dapo"}, {"name": "ppo_clip", "normalizer": "token", **CLIP}),
        ({"loss_type": "dr_grpo"}, {"name": "ppo_clip", "normalizer": "dr_grpo", **CLIP}),
        ({"loss_type": "grpo", "delta": 1.3}, {"name": "ppo_clip", "normalizer": "grpo", "dual_clip": 1.3, **CLIP}),
        (
            {"loss_type": "cispo", "epsilon_high": 1.2},
            {"name": "cispo", "normalizer": "token", "clip_low": None, "clip_high": 0.2},
        ),
        ({"loss_type": "sapo"}, {"name": "sapo", "normalizer": "grpo"}),
        ({"loss_type": "vespo"}, {"name": "vespo", "normalizer": "token"}),
        (
            {"loss_type": "grpo", "off_policy_mask_threshold": 0.05},
            {"name": "opsm", "normalizer": "grpo", "off_policy_kl": 0.05, **CLIP},
        ),
        (
            {"loss_type": "dapo", "top_entropy_quantile": 0.4},
            {"name": "top_entropy", "normalizer": "token", "entropy_fraction": 0.4, **CLIP},
        ),
        (
            {"loss_type": "grpo", "beta": 0.3},
            {"name": "ppo_clip", "normalizer": "grpo", "kl": "k3", "beta": 0.3, **CLIP},
        ),
        (
            {"loss_type": "dapo", "beta": 0.3, "use_bias_correction_kl": True},
            {"name": "ppo_clip", "normalizer": "token", "kl": "unbiased", "beta": 0.3, **CLIP},
        ),
    ],
    ids=str,
)
def test_loss_and_gradient_equal_trl(theirs, ours):
    batch = Batch()
    their_loss, their_gradient = trl_loss(batch, **theirs)
    loss, gradient = our_loss(batch, **ours)
    assert their_gradient.abs().max() > 1e-3
    atol = 1e-7 if theirs["loss_type"] == "sapo" else 1e-12  # its temperatures are float32 whatever the logprobs are
    torch.testing.assert_close(loss, their_loss, rtol=0, atol=atol)
    torch.testing.assert_close(gradient, their_gradient, rtol=0, atol=atol)


@pytest.mark.parametrize(("loss_type", "normalizer"), [("grpo", "grpo"), ("luspo", "sequence_sum")])
def test_sequence_level_loss_and_gradient_equal_trl_when_weights_are_per_rollout(loss_type, normalizer):
    """TRL averages the weights of a rollout before the gradient, Lockstep applies them per token (GSPO-token). With one
    weight per rollout the two are equal."""
    batch = Batch()
    batch.ratio = batch.ratio[:, :1].expand(ROWS, COLUMNS)
    their_loss, their_gradient = trl_loss(batch, loss_type=loss_type, **SEQUENCE)
    loss, gradient = our_loss(batch, "gspo", normalizer, **GSPO)
    assert (their_gradient.abs().amax(dim=1) > 1e-3).sum() >= 2, "not every rollout may be clipped"
    torch.testing.assert_close(loss, their_loss, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient, their_gradient, rtol=0, atol=1e-12)


def test_group_advantages_equal_trl():
    """`(rewards - mean) / (nanstd + 1e-4)` over adjacent rewards, as in TRL's `_generate_and_score_completions`."""
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.25, 3.0, -1.0, 0.0, 1.0], dtype=torch.float64)
    grouped = rewards.view(-1, 4)
    std = grpo_trainer.nanstd(grouped, dim=1).repeat_interleave(4)
    theirs = (rewards - grouped.mean(dim=1).repeat_interleave(4)) / (std + 1e-4)
    inputs = AdvantageInputs(rewards_S=rewards, group_S=torch.arange(8) // 4)
    ours = ADVANTAGES["grpo"](inputs, advantage_eps=1e-4).advantages_S
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)  # Bessel's factor is float32 there


def test_advantages_of_decoupled_rewards_equal_trl():
    """GDPO as TRL's `multi_objective_aggregation="normalize_then_sum"`, with a function that does not apply once."""
    nan = float("nan")
    values = [[1, 0.1], [0, 0.4], [1, 0.2], [0, nan], [0, 0.3], [0, 0.9], [1, 0.3], [0, 0.5]]
    rewards, weights = torch.tensor(values, dtype=torch.float64), torch.tensor([1.0, 0.25], dtype=torch.float64)
    grouped = rewards.view(2, 4, 2)
    std = grpo_trainer.nanstd(grouped, dim=1, keepdim=True)
    summed = (((grouped - grouped.nanmean(dim=1, keepdim=True)) / (std + 1e-4)).view(8, 2) * weights).nansum(dim=1)
    theirs = (summed - summed.mean()) / (grpo_trainer.nanstd(summed) + 1e-4)
    inputs = AdvantageInputs(
        rewards_S=(rewards * weights).nansum(dim=1),
        group_S=torch.arange(8) // 4,
        terms=RewardTerms(rewards_SF=rewards, weights_F=weights),
    )
    ours = ADVANTAGES["gdpo"](inputs, advantage_eps=1e-4).advantages_S
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)  # Bessel's factor is float32 there
