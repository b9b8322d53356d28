"""Rewards per token: the KL penalty on every token, the reward of a turn on its last one."""

from __future__ import annotations

import torch

from lockstep.trainer.objective.token_rewards import TurnRewards, last_token, token_rewards


def scores(*values: float) -> TurnRewards:
    """Return the rewards of rollouts of one turn."""
    count = len(values)
    return TurnRewards(torch.tensor(values), torch.arange(count), torch.zeros(count, dtype=torch.int64))


def test_the_kl_is_subtracted_and_the_score_is_added_on_the_last_token():
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


def test_the_last_token_of_a_turn_is_found_for_any_order_of_rows():
    rollout = torch.tensor([1, 1, 0, 0, 1])
    turn = torch.tensor([3, 3, 0, 1, 0])
    rollout_K, turn_K = torch.tensor([0, 0, 1, 1, 2]), torch.tensor([0, 1, 0, 3, 0])
    assert last_token(rollout_K, turn_K, rollout, turn).tolist() == [2, 3, 4, 1, -1]
    assert last_token(rollout_K, turn_K, rollout[:0], turn[:0]).tolist() == [-1] * 5


def test_the_reward_of_a_turn_without_trained_tokens_goes_to_the_last_token_before_it():
    rollout, turn = torch.tensor([0, 0, 1]), torch.tensor([1, 1, 0])
    rollout_K, turn_K = torch.tensor([0, 0, 0, 1]), torch.tensor([0, 1, 2, 0])
    assert last_token(rollout_K, turn_K, rollout, turn).tolist() == [-1, 1, 1, 2]
    turns = TurnRewards(torch.tensor([8.0, 1.0, 2.0, 4.0]), rollout_K, turn_K)
    zeros = torch.zeros(3)
    result = token_rewards(turns, zeros, zeros, rollout, turn, num_rollouts=2, kl_coef=0.0)
    assert result.rewards_T.tolist() == [0, 3, 4]
