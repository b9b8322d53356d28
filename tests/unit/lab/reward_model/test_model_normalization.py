"""Normalization of rewards."""

from __future__ import annotations

import pytest
import torch

from lockstep.lab.reward_model.model import Normalization, fit
from lockstep.rollout.errors import TrainingError


def test_normalized_rewards_have_mean_zero_and_population_variance_one():
    scores = torch.randn(256, dtype=torch.float64) * 5 + 40
    rewards = fit(scores)(scores)
    assert float(rewards.mean()) == pytest.approx(0, abs=1e-6)
    assert float(rewards.var(unbiased=False)) == pytest.approx(1, abs=1e-6)
    assert torch.equal(Normalization()(scores), scores)


def test_scores_that_are_all_equal_cannot_be_normalized():
    with pytest.raises(TrainingError, match="variance above 0"):
        fit(torch.ones(8))
    with pytest.raises(TrainingError, match="variance above 0"):
        fit(torch.tensor([1.0, torch.nan]))
