"""Loss normalization against hand-computed coefficients."""

from __future__ import annotations

import pytest
import torch

from lockstep.trainer.objective.loss_normalization import NORMALIZERS, StepCounts, loss_coefficients, normalized_loss

# Rollout 0 has 2 trained tokens, rollout 1 has 4; rollout 2 was delivered with all of its tokens masked.
ROLLOUT_T = torch.tensor([0, 1, 1, 0, 1, 1])
TOKENS_S = torch.tensor([2, 4, 0])
COUNTS = StepCounts(num_rollouts=3, num_tokens=6, max_completion_length=10)
LOSS_T = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("grpo", ((1 + 4) / 2 + (2 + 3 + 5 + 6) / 4) / 3),
        ("dr_grpo", 21 / 30),
        ("token", 21 / 6),
        ("sequence_sum", 21 / 3),
    ],
)
def test_loss_is_the_sum_over_its_denominator(name, loss):
    coefficient_T = loss_coefficients(name, ROLLOUT_T, TOKENS_S, COUNTS, dtype=torch.float64)
    assert float(normalized_loss(LOSS_T, coefficient_T)) == pytest.approx(loss, rel=1e-12)


def test_grpo_weighs_a_branched_rollout_like_an_unbranched_one():
    """|T_s| counts all rows of the rollout, also those outside of the microbatch."""
    part = loss_coefficients("grpo", ROLLOUT_T[:3], TOKENS_S, COUNTS, dtype=torch.float32)
    assert part.tolist() == pytest.approx([1 / 6, 1 / 12, 1 / 12])


@pytest.mark.parametrize("name", NORMALIZERS)
def test_a_step_without_rollouts_has_loss_zero_with_zero_gradient(name):
    logp_T = torch.zeros(0, requires_grad=True)
    counts = StepCounts(num_rollouts=0, num_tokens=0, max_completion_length=10)
    coefficient_T = loss_coefficients(name, torch.zeros(0).long(), torch.zeros(0), counts, dtype=torch.float32)
    loss = normalized_loss(logp_T * 2, coefficient_T)
    loss.backward()
    assert loss.item() == 0.0
    assert logp_T.grad is not None


def test_a_token_denominator_of_zero_gives_coefficients_of_zero():
    counts = StepCounts(num_rollouts=2, num_tokens=0, max_completion_length=10)
    coefficient_T = loss_coefficients("token", torch.tensor([0]), torch.tensor([0, 0]), counts, dtype=torch.float32)
    assert coefficient_T.tolist() == [0.0]
