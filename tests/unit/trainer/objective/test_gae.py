"""GAE against a loop over plain lists: limits of λ, holes, ragged rollouts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.trainer.objective.gae import gae, gae_flat, length_adaptive_lambda


def naive(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Return Σ_l (γλ)^l δ_{t+l}, summed forwards as in the paper."""
    after = [*values[1:], 0.0]
    deltas = [r + gamma * n - v for r, v, n in zip(rewards, values, after, strict=True)]
    return [sum((gamma * lam) ** (j - t) * deltas[j] for j in range(t, len(deltas))) for t in range(len(deltas))]


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


def test_two_tokens_by_hand():
    found = gae(row(0, 1), row(0.5, 0.2), row(1, 1).bool(), gamma=0.9, lam=0.8)
    # δ1 = 1 − .2 = .8; δ0 = .9 · .2 − .5 = −.32; A0 = −.32 + .72 · .8
    assert found.advantages[0].tolist() == pytest.approx([0.256, 0.8])
    assert found.returns[0].tolist() == pytest.approx([0.756, 1.0])


def test_lambda_one_gives_reward_to_go_and_lambda_zero_one_step_td():
    rewards, values, mask = row(1, 2, 3), row(0.1, 0.2, 0.3), row(1, 1, 1).bool()
    assert gae(rewards, values, mask, gamma=1.0, lam=1.0).returns[0].tolist() == pytest.approx([6.0, 5.0, 3.0])
    assert gae(rewards, values, mask, gamma=1.0, lam=0.0).returns[0].tolist() == pytest.approx([1.2, 2.3, 3.0])


def test_a_hole_is_skipped_and_its_values_have_no_effect():
    solid = gae(row(0, 1, 5), row(0.5, 0.2, 0.7), row(1, 1, 1).bool(), gamma=0.9, lam=0.8)
    mask = row(0, 1, 0, 0, 1, 1, 0).bool()
    rewards = row(9, 0, math.nan, 9, 1, 5, math.inf)
    holes = gae(rewards, row(9, 0.5, 9, math.nan, 0.2, 0.7, 9), mask, gamma=0.9, lam=0.8)
    assert holes.advantages[mask].tolist() == pytest.approx(solid.advantages[0].tolist())
    assert holes.returns[mask].tolist() == pytest.approx(solid.returns[0].tolist())
    assert holes.advantages[~mask].tolist() == [0.0] * 4
    assert holes.returns[~mask].tolist() == [0.0] * 4


TOKENS = st.lists(
    st.tuples(st.integers(0, 3), st.floats(-5, 5), st.floats(-5, 5), st.integers(0, 2)), min_size=0, max_size=30
)


@given(tokens=TOKENS, gamma=st.floats(0, 1), lam=st.floats(0, 1), by_turn=st.booleans())
def test_each_rollout_has_the_advantages_that_it_has_alone(tokens, gamma, lam, by_turn):
    rollouts, rewards, values, turns = (list(column) for column in zip(*tokens, strict=True)) if tokens else ([],) * 4
    found = gae_flat(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(values, dtype=torch.float64),
        torch.tensor(rollouts, dtype=torch.long),
        gamma=gamma,
        lam=lam,
        turn_T=torch.tensor(turns, dtype=torch.long) if by_turn else None,
    )
    for rollout in set(rollouts):
        order = [t for t in range(len(tokens)) if rollouts[t] == rollout]
        if by_turn:
            order.sort(key=lambda t: turns[t])
        alone = naive([rewards[t] for t in order], [values[t] for t in order], gamma, lam)
        assert found.advantages[order].tolist() == pytest.approx(alone, abs=1e-9)
        assert found.returns[order].tolist() == pytest.approx(
            [a + values[t] for a, t in zip(alone, order, strict=True)], abs=1e-9
        )


def test_rows_of_a_rollout_are_ordered_by_turn():
    """The row with turns 0 and 2 comes before the branch with turn 1."""
    values_T = torch.tensor([0.0, 4.0, 2.0], dtype=torch.float64)
    found = gae_flat(
        torch.zeros(3, dtype=torch.float64),
        values_T,
        torch.zeros(3, dtype=torch.long),
        gamma=1.0,
        lam=0.0,
        turn_T=torch.tensor([0, 2, 1]),
    )
    # one-step TD: the successor of turn 0 is turn 1 (value 2), of turn 1 turn 2 (value 4)
    assert found.returns.tolist() == [2.0, 0.0, 4.0]


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


def test_a_ragged_row_has_the_same_advantages_alone_and_in_the_batch():
    lengths = [3, 7, 1]
    rollout = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    rewards, values = torch.randn(11), torch.randn(11)
    whole = gae_flat(rewards, values, rollout, gamma=1.0, lam=0.95)
    for index in range(3):
        own = rollout == index
        alone = gae_flat(rewards[own], values[own], rollout[own], gamma=1.0, lam=0.95)
        torch.testing.assert_close(whole.advantages[own], alone.advantages, rtol=0, atol=0)


# λ by rollout ------------------------------------------------------------------------------------------------------


def test_lambda_may_differ_by_rollout():
    rollout_T = torch.tensor([3, 1, 3, 1, 1])
    rewards, values = torch.tensor([1.0, 2, 3, 4, 5]).double(), torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5]).double()
    lam_T = torch.tensor([0.5, 0.9, 0.5, 0.9, 0.9]).double()
    found = gae_flat(rewards, values, rollout_T, gamma=0.8, lam=lam_T)
    assert found.advantages[[0, 2]].tolist() == pytest.approx(naive([1, 3], [0.1, 0.3], 0.8, 0.5))
    assert found.advantages[[1, 3, 4]].tolist() == pytest.approx(naive([2, 4, 5], [0.2, 0.4, 0.5], 0.8, 0.9))
    assert gae_flat(rewards[:0], values[:0], rollout_T[:0], gamma=0.8, lam=lam_T[:0]).advantages.shape == (0,)


def test_the_length_adaptive_lambda_counts_the_trained_tokens_of_all_rows_of_a_rollout():
    """VAPO: 1 − 1 / (α l). Rollout 7 has 5 tokens, in three places of the batch; rollout 2 has 1, for which the formula
    gives −1."""
    rollout_T = torch.tensor([7, 7, 2, 7, 7, 7])
    found = length_adaptive_lambda(rollout_T, alpha=0.5)
    assert found.tolist() == pytest.approx([0.6, 0.6, 0.0, 0.6, 0.6, 0.6])
    sum_of_weights = sum((1 - 1 / (0.05 * 2000)) ** t for t in range(100_000))
    assert sum_of_weights == pytest.approx(0.05 * 2000), "the paper's condition: Σ λ^t = α l"
