"""PPO's mathematics: whitening, rewards per token, value clipping, KL control, Adam's two epsilons."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.objective.gae import gae, gae_flat
from trainer.objective.kl_control import AdaptiveKl, FixedKl
from trainer.objective.losses.value import clipped_value_loss
from trainer.objective.per_rollout import RankReduction
from trainer.objective.ppo_metrics import explained_variance, objective_metrics, value_metrics
from trainer.objective.token_rewards import TurnRewards, last_token, token_rewards
from trainer.objective.whitening import moments, whiten
from trainer.update.tf_adam import set_tf_epsilon, tf_epsilon

REWARDS = torch.tensor([[1.2, 1.3, 1.4], [1.5, 1.6, 1.7], [1.8, 1.9, 2.0]], dtype=torch.float64)
WHITENED = torch.tensor(
    [[0.05080712, 0.4381051, 0.8254035], [1.2127019, 1.6000004, 1.9872988], [2.3745968, 2.7618952, 3.1491938]],
    dtype=torch.float64,
)
"""What TensorFlow printed in seed 003, in float32."""


# Whitening (P9)


def test_whitening_gives_the_array_of_the_seed_not_that_of_the_sample_variance():
    torch.testing.assert_close(whiten(REWARDS, shift_mean=False), WHITENED, rtol=0, atol=1e-5)
    assert moments(REWARDS).variance == pytest.approx(0.2 / 3)


def test_whitened_advantages_have_mean_zero_and_population_variance_one():
    x = whiten(torch.randn(50, dtype=torch.float64) * 7 + 3)
    assert float(x.mean()) == pytest.approx(0, abs=1e-12)
    assert float(x.var(unbiased=False)) == pytest.approx(1, abs=1e-8)


def test_masked_entries_have_no_part_in_whitening_and_come_out_as_zero():
    mask = torch.tensor([True, False, True, True, False])
    x = torch.tensor([1.0, torch.nan, 4.0, -2.0, 1e30])
    torch.testing.assert_close(whiten(x, mask)[mask], whiten(x[mask]))
    assert whiten(x, mask)[~mask].tolist() == [0.0, 0.0]


def test_equal_entries_become_zero_or_stay_and_nothing_gives_nothing():
    x = torch.full((4,), 2.5)
    assert whiten(x).tolist() == [0.0] * 4
    assert whiten(x, shift_mean=False).tolist() == [2.5] * 4
    assert whiten(torch.zeros(0)).shape == (0,)
    assert not whiten(x, torch.zeros(4, dtype=torch.bool)).isnan().any()


@settings(deadline=None)
@given(
    st.lists(st.floats(-100, 100), min_size=2, max_size=20),
    st.integers(0, 20),
)
def test_whitening_on_ranks_is_that_of_all_of_them_together(values, cut):
    x = torch.tensor(values, dtype=torch.float64)
    parts = [x[:cut], x[cut:]]
    merged = moments(x)
    sums = [
        torch.stack([x.sum(), torch.tensor(float(len(x)), dtype=torch.float64)]),
        (x - merged.mean).square().sum(),
    ]
    for part in parts:
        answers = iter(sums)  # what an all-reduce hands to every rank
        torch.testing.assert_close(
            moments(part, over_ranks=RankReduction(sum=lambda _, a=answers: next(a))), merged, rtol=1e-12, atol=1e-12
        )


# Rewards per token (P8)


def scores(*values: float) -> TurnRewards:
    """One turn per rollout."""
    count = len(values)
    return TurnRewards(torch.tensor(values), torch.arange(count), torch.zeros(count, dtype=torch.int64))


def test_kl_costs_and_the_score_is_added_on_the_last_token():
    logp = torch.tensor([-1.0, -2.0, -3.0])
    reference = torch.tensor([-1.5, -2.0, -2.0])
    zeros = torch.zeros(3, dtype=torch.int64)
    result = token_rewards(scores(0.4), logp, reference, zeros, zeros, num_rollouts=1, kl_coef=0.1)
    torch.testing.assert_close(result.rewards_T, torch.tensor([-0.05, 0.0, 0.1 + 0.4]))
    torch.testing.assert_close(result.kl_S, torch.tensor([-0.5]))


def test_policy_equal_to_the_reference_has_no_kl():
    logp, rollout = torch.randn(6), torch.tensor([0, 0, 1, 1, 1, 2])
    zeros = torch.zeros_like(rollout)
    result = token_rewards(scores(1, 1, 1), logp, logp.clone(), rollout, zeros, num_rollouts=3, kl_coef=0.15)
    assert result.kl_S.tolist() == [0.0] * 3
    assert result.rewards_T.tolist() == [0, 1, 0, 0, 1, 1]


def test_the_last_token_of_a_turn_is_found_wherever_its_row_lies():
    rollout = torch.tensor([1, 1, 0, 0, 1])
    turn = torch.tensor([3, 3, 0, 1, 0])
    rollout_K, turn_K = torch.tensor([0, 0, 1, 1, 2]), torch.tensor([0, 1, 0, 3, 0])
    assert last_token(rollout_K, turn_K, rollout, turn).tolist() == [2, 3, 4, 1, -1]
    assert last_token(rollout_K, turn_K, rollout[:0], turn[:0]).tolist() == [-1] * 5


def test_a_turn_without_trained_tokens_pays_the_last_one_before_it():
    rollout, turn = torch.tensor([0, 0, 1]), torch.tensor([1, 1, 0])
    rollout_K, turn_K = torch.tensor([0, 0, 0, 1]), torch.tensor([0, 1, 2, 0])
    assert last_token(rollout_K, turn_K, rollout, turn).tolist() == [-1, 1, 1, 2]
    turns = TurnRewards(torch.tensor([8.0, 1.0, 2.0, 4.0]), rollout_K, turn_K)
    zeros = torch.zeros(3)
    result = token_rewards(turns, zeros, zeros, rollout, turn, num_rollouts=2, kl_coef=0.0)
    assert result.rewards_T.tolist() == [0, 3, 4]


# GAE (P6)


def test_lambda_one_is_reward_to_go_and_lambda_zero_one_step_td():
    rewards, values = torch.randn(2, 5, dtype=torch.float64), torch.randn(2, 5, dtype=torch.float64)
    mask = torch.ones(2, 5, dtype=torch.bool)
    to_go = rewards.flip(1).cumsum(1).flip(1)
    torch.testing.assert_close(gae(rewards, values, mask, gamma=1.0, lam=1.0).returns, to_go)
    next_values = torch.cat([values[:, 1:], torch.zeros(2, 1, dtype=torch.float64)], 1)
    torch.testing.assert_close(
        gae(rewards, values, mask, gamma=0.9, lam=0.0).advantages, rewards + 0.9 * next_values - values
    )


def test_historical_gae_by_hand():
    """γ = 1, λ = 0.95: δ₂ = 1 − 0.5, δ₁ = 0 + 0.5 − 0.2, A₁ = δ₁ + 0.95 δ₂."""
    result = gae(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.2, 0.5]]), torch.ones(1, 2).bool(), gamma=1.0, lam=0.95)
    torch.testing.assert_close(result.advantages, torch.tensor([[0.3 + 0.95 * 0.5, 0.5]]))


def test_a_ragged_row_alone_gets_what_it_gets_in_the_batch():
    lengths = [3, 7, 1]
    rollout = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    rewards, values = torch.randn(11), torch.randn(11)
    whole = gae_flat(rewards, values, rollout, gamma=1.0, lam=0.95)
    for index in range(3):
        own = rollout == index
        alone = gae_flat(rewards[own], values[own], rollout[own], gamma=1.0, lam=0.95)
        torch.testing.assert_close(whole.advantages[own], alone.advantages, rtol=0, atol=0)


# Value loss (P10)


def test_value_loss_is_half_the_larger_of_the_two_squared_errors():
    values, old = torch.tensor([1.0, 1.0, 0.1]), torch.tensor([0.0, 2.0, 0.0])
    returns = torch.tensor([2.0, 2.0, 5.0])
    loss, metrics = clipped_value_loss(values, old, returns, clip=0.2)
    # clipped values: 0.2, 1.8, 0.1
    torch.testing.assert_close(loss, 0.5 * torch.tensor([1.8**2, 1.0, 4.9**2]))
    assert metrics["ppo/value/clip_frac"] == 1


def test_a_value_that_has_moved_past_the_clip_gets_no_gradient():
    values = torch.tensor([1.0, 0.1], requires_grad=True)
    clipped_value_loss(values, torch.zeros(2), torch.tensor([3.0, 3.0]), clip=0.2).loss_T.sum().backward()
    assert values.grad is not None
    assert values.grad[0] == 0
    assert values.grad[1] == pytest.approx(0.1 - 3.0)


def test_without_a_clip_the_value_loss_is_half_the_squared_error():
    loss, _ = clipped_value_loss(torch.tensor([1.0]), torch.tensor([9.0]), torch.tensor([4.0]), clip=None)
    assert loss.item() == 4.5
    with pytest.raises(ValueError, match="expected above 0"):
        clipped_value_loss(torch.ones(1), torch.ones(1), torch.ones(1), clip=0.0)
    with pytest.raises(ValueError, match="one shape"):
        clipped_value_loss(torch.ones(2), torch.ones(1), torch.ones(2), clip=0.2)


# KL control (P11)


@pytest.mark.parametrize(
    ("kl", "expected"),
    [(6.0, 0.15), (6.6, 0.15 * (1 + 0.1 * 64 / 10000)), (60.0, 0.15 * (1 + 0.2 * 64 / 10000)),
     (0.0, 0.15 * (1 - 0.2 * 64 / 10000)), (-3.0, 0.15 * (1 - 0.2 * 64 / 10000))],
)  # fmt: skip
def test_adaptive_kl_moves_by_the_clipped_error_times_episodes_over_horizon(kl, expected):
    assert AdaptiveKl(target=6, horizon=10000).next(0.15, kl=kl, num_episodes=64) == pytest.approx(expected, rel=1e-12)


@settings(deadline=None)
@given(st.floats(-1e6, 1e6), st.integers(1, 499))
def test_the_coefficient_never_changes_its_sign(kl, num_episodes):
    assert AdaptiveKl(target=6, horizon=100).next(0.15, kl=kl, num_episodes=num_episodes) > 0


def test_batches_of_five_horizons_are_refused_because_the_sign_would_flip():
    with pytest.raises(ValueError, match="horizon above 100"):
        AdaptiveKl(target=6, horizon=100).next(0.15, kl=0.0, num_episodes=500)
    with pytest.raises(ValueError, match="both above 0"):
        AdaptiveKl(target=0, horizon=100)


def test_fixed_kl_stays():
    assert FixedKl().next(0.15, kl=1e9, num_episodes=10**9) == 0.15


# Metrics (P12)


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


# Adam (A1, A2)


def tensorflow_adam(gradients, lr, beta1, beta2, epsilon):
    """The update that TensorFlow documents, in plain Python."""
    x = m = v = 0.0
    for t, g in enumerate(gradients, 1):
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        x -= lr * math.sqrt(1 - beta2**t) / (1 - beta1**t) * m / (math.sqrt(v) + epsilon)
    return x


@pytest.mark.parametrize("kind", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("optimizer_class", [torch.optim.Adam, torch.optim.AdamW])
def test_torch_adam_with_the_epsilon_of_the_step_is_tensorflows(kind, optimizer_class):
    gradients = [3e-5, -1e-6, 2e-4, 1e-5]
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = optimizer_class([parameter], lr=1e-3, betas=(0.9, 0.999), eps=1e-5, weight_decay=0.0, **kind)
    for step, gradient in enumerate(gradients, 1):
        parameter.grad = torch.full_like(parameter, gradient)
        set_tf_epsilon(optimizer, 1e-5, step)
        optimizer.step()
    assert parameter.item() == pytest.approx(tensorflow_adam(gradients, 1e-3, 0.9, 0.999, 1e-5), rel=1e-9)


def test_the_epsilon_starts_large_and_ends_as_torchs():
    assert tf_epsilon(1e-5, 0.999, 1) == pytest.approx(1e-5 / math.sqrt(0.001))
    assert tf_epsilon(1e-5, 0.999, 100_000) == pytest.approx(1e-5)
    with pytest.raises(ValueError, match="expected 1 for the first"):
        tf_epsilon(1e-5, 0.999, 0)
