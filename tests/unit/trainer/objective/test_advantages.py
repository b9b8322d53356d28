"""Advantages by hand."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.rollout.errors import RewardError
from lockstep.trainer.objective.advantages import ADVANTAGES
from lockstep.trainer.objective.advantages.inputs import AdvantageInputs, Advantages, RewardTerms
from lockstep.trainer.objective.turn_credit import discounted_returns, spread_turns, turn_groups

REWARDS = [1.0, 0.1, 0.0, 0.1, 0.5, 0.1]
GROUPS = [7, 3, 7, 3, 7, 3]  # group numbers are labels; rollouts of a group need not be adjacent


ROLLOUT_LEVEL = sorted(
    name for name, declared in ADVANTAGES.items() if not declared.needs_critic and not declared.needs_states
)


def estimate(name: str, rewards_S, group_S, *, greedy_rewards_S=None, **settings) -> Advantages:
    terms = RewardTerms(rewards_SF=rewards_S[:, None], weights_F=torch.ones(1)) if name == "gdpo" else None
    inputs = AdvantageInputs(rewards_S=rewards_S, group_S=group_S, greedy_rewards_S=greedy_rewards_S, terms=terms)
    return ADVANTAGES[name](inputs, **settings)


def advantages(name: str, rewards=REWARDS, groups=GROUPS, **options) -> list[float]:
    return estimate(name, torch.tensor(rewards).double(), torch.tensor(groups), **options).advantages_S.tolist()


def test_grpo_divides_the_distance_to_the_group_mean_by_the_sample_deviation():
    # group 7: 1, 0, .5: mean .5, sample deviation .5
    found = advantages("grpo", advantage_eps=0.0)
    assert found == pytest.approx([1.0, 0.0, -1.0, 0.0, 0.0, 0.0])


def test_grpo_with_ddof_zero_divides_by_the_population_deviation():
    assert advantages("grpo", advantage_ddof=0, advantage_eps=0.0)[0] == pytest.approx(
        0.5 / statistics.pstdev([1.0, 0.0, 0.5])
    )


def test_grpo_eps_is_added_to_the_deviation():
    assert advantages("grpo", advantage_eps=0.5)[0] == pytest.approx(0.5)


def test_dr_grpo_only_centers():
    assert advantages("dr_grpo") == pytest.approx([0.5, 0.0, -0.5, 0.0, 0.0, 0.0])


def test_rloo_subtracts_the_mean_of_the_others():
    # 1 − (0 + .5)/2, 0 − (1 + .5)/2, .5 − (1 + 0)/2
    assert advantages("rloo") == pytest.approx([0.75, 0.0, -0.75, 0.0, 0.0, 0.0])


def test_reinforce_plus_plus_whitens_over_the_step():
    mean, std = statistics.mean(REWARDS), statistics.stdev(REWARDS)
    assert advantages("reinforce_plus_plus", advantage_eps=0.0) == pytest.approx([(r - mean) / std for r in REWARDS])


def test_reinforce_plus_plus_baseline_whitens_the_centered_rewards():
    std = statistics.stdev([0.5, 0.0, -0.5, 0.0, 0.0, 0.0])
    found = advantages("reinforce_plus_plus_baseline", advantage_eps=0.0)
    assert found == pytest.approx([0.5 / std, 0.0, -0.5 / std, 0.0, 0.0, 0.0])


def test_remax_subtracts_the_greedy_reward():
    found = advantages("remax", greedy_rewards_S=torch.tensor([0.5, 0.0, 0.5, 0.0, 0.5, 0.0]))
    assert found == pytest.approx([0.5, 0.1, -0.5, 0.1, 0.0, 0.1])


def test_grpo_passk_gives_the_best_rollout_its_lead_over_the_second():
    assert advantages("grpo_passk", advantage_std=False) == pytest.approx([0.5, 0, 0, 0, 0, 0])
    assert advantages("grpo_passk", advantage_eps=0.0) == pytest.approx([1.0, 0, 0, 0, 0, 0])


def test_grpo_passk_gives_zero_to_a_tie():
    assert advantages("grpo_passk", [1.0, 1.0, 0.0], [0, 0, 0]) == [0.0] * 3


@pytest.mark.parametrize("name", sorted(set(ROLLOUT_LEVEL) - {"remax", "reinforce_plus_plus"}))
def test_a_group_of_equal_rewards_gets_exactly_zero(name):
    """0.1 is not a binary fraction: centered rewards and their deviation are rounding, which eps would amplify."""
    found = advantages(name, [0.1] * 7 + [0.0, 1.0], [0] * 7 + [1, 1])
    assert found[:7] == [0.0] * 7
    assert found[8] > 0


@pytest.mark.parametrize("name", sorted(set(ROLLOUT_LEVEL) - {"remax"}))
def test_a_group_of_one_gets_zero(name):
    assert advantages(name, [3.0], [0]) == [0.0]


@pytest.mark.parametrize("name", ROLLOUT_LEVEL)
def test_groups_of_zero_variance_are_counted(name):
    options = {"greedy_rewards_S": torch.zeros(5)} if name == "remax" else {}
    found = estimate(name, torch.tensor([1.0, 1, 0, 1, 5]), torch.tensor([0, 0, 1, 1, 2]), **options)
    assert found.metrics == {"reward/zero_std_fraction": pytest.approx(2 / 3)}
    assert found.advantages_S.dtype == torch.float32


@pytest.mark.parametrize("name", ROLLOUT_LEVEL)
def test_a_step_without_rollouts_has_no_advantages(name):
    options = {"greedy_rewards_S": torch.zeros(0)} if name == "remax" else {}
    found = estimate(name, torch.zeros(0), torch.zeros(0, dtype=torch.long), **options)
    assert found.advantages_S.shape == (0,)
    assert found.metrics == {"reward/zero_std_fraction": 0.0}


REWARD_LISTS = st.lists(st.tuples(st.integers(0, 3), st.floats(-10, 10, width=32)), min_size=1, max_size=20)


@given(
    rollouts=REWARD_LISTS, order=st.randoms(use_true_random=False), name=st.sampled_from(["grpo", "rloo", "grpo_passk"])
)
def test_advantages_do_not_depend_on_the_order_of_rollouts(rollouts, order, name):
    shuffled = list(range(len(rollouts)))
    order.shuffle(shuffled)
    groups, rewards = [g for g, _ in rollouts], [r for _, r in rollouts]
    straight = advantages(name, rewards, groups)
    found = advantages(name, [rewards[i] for i in shuffled], [groups[i] for i in shuffled])
    assert found == pytest.approx([straight[i] for i in shuffled], abs=1e-9)


@given(rollouts=REWARD_LISTS)
def test_centered_advantages_sum_to_zero_in_every_group_and_ignore_a_shift(rollouts):
    groups, rewards = [g for g, _ in rollouts], [r for _, r in rollouts]
    found = advantages("dr_grpo", rewards, groups)
    for group in set(groups):
        assert sum(a for a, g in zip(found, groups, strict=True) if g == group) == pytest.approx(0.0, abs=1e-9)
    assert advantages("dr_grpo", [r + 1 for r in rewards], groups) == pytest.approx(found, abs=1e-5)


def test_remax_requires_greedy_rewards():
    with pytest.raises(AssertionError, match="needs greedy_rewards_S"):
        advantages("remax")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_refused(bad):
    with pytest.raises(RewardError, match=r"rollout 1 \(group 4\) is (nan|inf)"):
        estimate("grpo", torch.tensor([1.0, bad]), torch.tensor([4, 4]))


def test_rewards_and_groups_of_different_length_are_refused():
    with pytest.raises(ValueError, match=r"rewards \(3,\) and groups \(2,\)"):
        estimate("dr_grpo", torch.zeros(3), torch.zeros(2, dtype=torch.long))


def test_advantages_are_computed_in_float64():
    """The float32 mean of these rewards with a large offset is wrong by a third."""
    found = estimate("dr_grpo", torch.tensor([1e7, 1e7 + 1, 1e7 + 3]), torch.tensor([0, 0, 0])).advantages_S
    assert found.tolist() == pytest.approx([-4 / 3, -1 / 3, 5 / 3], abs=1e-6)


# Turns -----------------------------------------------------------------------------------------------------------


def test_returns_of_turns_are_discounted_within_their_rollout():
    rewards_K = torch.tensor([1.0, 10.0, 0.0, 20.0, 4.0], dtype=torch.float64)
    rollout_K = torch.tensor([0, 1, 0, 1, 0])
    # rollout 0: turns 1, 0, 4; rollout 1: turns 10, 20
    found = discounted_returns(rewards_K, rollout_K, gamma=0.5)
    assert found.tolist() == pytest.approx([1 + 0.25 * 4, 10 + 0.5 * 20, 0.5 * 4, 20.0, 4.0])


def test_turn_advantages_compare_the_same_turn_of_the_group_and_reach_their_tokens():
    rollout_K, turn_K = torch.tensor([0, 0, 1, 1, 2]), torch.tensor([0, 1, 0, 1, 0])
    group_K = torch.tensor([5, 5, 5, 5, 6])
    returns_K = torch.tensor([1.0, 4.0, 3.0, 8.0, 9.0])
    advantages_K = estimate("dr_grpo", returns_K, turn_groups(group_K, turn_K)).advantages_S
    assert advantages_K.tolist() == [-1.0, -2.0, 1.0, 2.0, 0.0]
    rollout_T, turn_T = torch.tensor([1, 0, 0, 2, 1]), torch.tensor([1, 0, 1, 0, 0])
    found = spread_turns(advantages_K, rollout_K, turn_K, rollout_T, turn_T)
    assert found.tolist() == [2.0, -1.0, -2.0, 0.0, 1.0]


def test_a_token_whose_turn_has_no_value_is_refused():
    with pytest.raises(ValueError, match="turn that has no value"):
        spread_turns(torch.ones(1), torch.tensor([0]), torch.tensor([0]), torch.tensor([0]), torch.tensor([1]))
    with pytest.raises(ValueError, match="given twice"):
        spread_turns(torch.ones(2), torch.tensor([0, 0]), torch.tensor([1, 1]), torch.tensor([0]), torch.tensor([1]))
