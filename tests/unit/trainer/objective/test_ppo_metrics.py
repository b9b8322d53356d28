"""PPO metrics of a rollout batch."""

from __future__ import annotations

import pytest
import torch

from lockstep.trainer.objective.ppo_metrics import explained_variance, objective_metrics, value_metrics


def test_objective_metrics_are_means_over_episodes_of_sums_over_tokens():
    rollout = torch.tensor([0, 0, 1])
    metrics = objective_metrics(
        torch.tensor([1.0, 3.0]),
        torch.tensor([0.5, 1.5]),
        torch.tensor([-0.1, -0.2, -0.5]),
        torch.tensor([-1.0, -2.0, -4.0]),
        rollout,
        kl_coef=0.2,
    )
    assert metrics == pytest.approx(
        {
            "objective/kl": 1.0,
            "objective/kl_coef": 0.2,
            "objective/entropy": 3.5,
            "objective/score": 2.0,
            "objective/non_score_reward": -0.4,
            "objective/score_total": 1.6,
        }
    )


def test_explained_variance_is_one_for_returns_and_zero_for_any_constant():
    returns = torch.randn(20)
    keep = torch.arange(20) < 15
    spoiled = torch.where(keep, returns, torch.tensor(1e9))
    assert float(explained_variance(spoiled, returns, keep)) == pytest.approx(1)
    assert float(explained_variance(torch.full((20,), 3.0), returns, keep)) == pytest.approx(0, abs=1e-6)
    assert float(explained_variance(returns, torch.ones(20), keep)) == 0
    assert value_metrics(returns, returns, torch.zeros(20, dtype=torch.bool)) == {}
