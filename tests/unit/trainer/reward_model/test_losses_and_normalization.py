"""Loss, head and normalization of a reward model."""

from __future__ import annotations

import math

import pytest
import torch

from rollout.errors import TrainingError
from trainer.reward_model.head import init_reward_head
from trainer.reward_model.losses import best_of_n_loss, pairwise_loss
from trainer.reward_model.normalization import Normalization, fit

# Loss (R4)


def test_best_of_four_is_the_cross_entropy_over_four_scalars():
    scores = torch.tensor([[1.0, 2.0, 0.0, -1.0], [0.0, 0.0, 0.0, 0.0]])
    loss, metrics = best_of_n_loss(scores, torch.tensor([1, 3]))
    expected = -torch.log_softmax(scores, 1)[[0, 1], [1, 3]]
    torch.testing.assert_close(loss, expected)
    assert metrics["accuracy"] == 1  # a tie is not a win
    assert metrics["margin"] == 1.0


def test_pairs_are_bradley_terry_and_a_margin_must_be_won_by():
    chosen, rejected, margin = torch.tensor([1.0, 0.5]), torch.tensor([0.2, 2.0]), torch.tensor([0.0, 0.7])
    loss, metrics = pairwise_loss(chosen, rejected, margin)
    torch.testing.assert_close(loss, -torch.nn.functional.logsigmoid(chosen - rejected - margin))
    assert metrics["accuracy"] == 1


def test_responses_that_are_not_there_have_no_part_in_the_loss():
    scores = torch.tensor([[1.0, 2.0, 50.0]], requires_grad=True)
    there = torch.tensor([[True, True, False]])
    loss, metrics = best_of_n_loss(scores, torch.tensor([0]), there)
    torch.testing.assert_close(loss, pairwise_loss(torch.tensor([1.0]), torch.tensor([2.0])).loss_B)
    assert metrics["margin"] == -1
    loss.sum().backward()
    assert scores.grad is not None
    assert scores.grad[0, 2] == 0
    with pytest.raises(ValueError, match="does not have"):
        best_of_n_loss(scores, torch.tensor([2]), there)


# Head and normalisation (R2, R3)


def test_the_reward_head_starts_with_the_root():
    head = torch.nn.Linear(4095, 64)
    init_reward_head(head, generator=torch.Generator().manual_seed(0))
    assert head.weight.std().item() == pytest.approx(1 / math.sqrt(4096), rel=0.01)
    assert head.bias.abs().max() == 0


def test_normalised_rewards_have_mean_zero_and_population_variance_one():
    scores = torch.randn(256, dtype=torch.float64) * 5 + 40
    rewards = fit(scores)(scores)
    assert float(rewards.mean()) == pytest.approx(0, abs=1e-6)
    assert float(rewards.var(unbiased=False)) == pytest.approx(1, abs=1e-6)
    assert Normalization()(scores) is not None


def test_scores_that_are_all_equal_cannot_be_normalised():
    with pytest.raises(TrainingError, match="variance above 0"):
        fit(torch.ones(8))
    with pytest.raises(TrainingError, match="variance above 0"):
        fit(torch.tensor([1.0, torch.nan]))
