"""Advantages of rollouts from their rewards.

Every estimator takes `rewards_S` (one per rollout of the step, over all ranks) and `group_S` (int64; rollouts of one
prompt share a number, in any order) and returns one advantage per rollout. Statistics are per rollout, never per row
or token: a rollout that was split into branches, or is long, counts once. Computed in float64, returned in the
dtype of the rewards. Advantages with a value function are `trainer/objective/gae.py`'s.

A group whose rewards are all equal gets exactly 0 from every estimator with a group baseline: it says nothing, and
rounding divided by eps must not say something for it. Such groups are counted in `reward/zero_std_fraction`.

Dimensions: `_S` rollouts, `_G` groups, `_K` turns, `_T` trained tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rollout.errors import RewardError
from trainer.objective.per_rollout import rollout_count, rollout_max, rollout_sum

STD_EPS = 1e-6
"""Added to a standard deviation. Rewards are of order 1; this only keeps tiny deviations from becoming huge."""


class Advantages(NamedTuple):
    advantages_S: Tensor
    metrics: dict[str, float]


class _Groups(NamedTuple):
    """Rewards in float64 with the statistics of each rollout's group."""

    rewards_S: Tensor
    index_S: Tensor  # groups renumbered from 0
    size_S: Tensor
    mean_S: Tensor
    is_flat_S: Tensor  # all rewards of the group are equal
    metrics: dict[str, float]

    def std(self, ddof: int) -> Tensor:
        """Per rollout, the standard deviation of its group's rewards; 0 where there are no more than ddof of them."""
        num_groups = int(self.index_S.max()) + 1 if len(self.index_S) else 0
        squares_G = rollout_sum((self.rewards_S - self.mean_S).square(), self.index_S, num_groups)
        return (squares_G[self.index_S] / (self.size_S - ddof).clamp(min=1)).sqrt()


def _groups(rewards_S: Tensor, group_S: Tensor) -> _Groups:
    if rewards_S.ndim != 1 or rewards_S.shape != group_S.shape:
        raise ValueError(
            f"rewards {tuple(rewards_S.shape)} and groups {tuple(group_S.shape)} must be flat and of one length, "
            "one entry per rollout"
        )
    finite_S = torch.isfinite(rewards_S)
    if not finite_S.all():
        where = int((~finite_S).nonzero()[0])
        raise RewardError(
            f"the reward of rollout {where} (group {int(group_S[where])}) is {float(rewards_S[where])}; expected a "
            "finite number: a reward function must fail instead of returning it"
        )
    rewards = rewards_S.detach().double()
    names_G, index_S = torch.unique(group_S, return_inverse=True)
    size_G = rollout_count(index_S, len(names_G))
    mean_G = rollout_sum(rewards, index_S, len(names_G)) / size_G
    is_flat_G = rollout_max(rewards, index_S, len(names_G)) == -rollout_max(-rewards, index_S, len(names_G))
    flat_fraction = float(is_flat_G.double().mean()) if len(names_G) else 0.0
    return _Groups(
        rewards_S=rewards,
        index_S=index_S,
        size_S=size_G[index_S],
        mean_S=mean_G[index_S],
        is_flat_S=is_flat_G[index_S],
        metrics={"reward/zero_std_fraction": flat_fraction},
    )


def grpo(
    rewards_S: Tensor, group_S: Tensor, *, normalize_std: bool = True, ddof: int = 1, eps: float = STD_EPS
) -> Advantages:
    """(r − mean of the group) / (std of the group + eps), or without the division.

    Shao et al. 2024 (DeepSeekMath), section 4.1.2. `ddof` = 1 is the sample deviation that running code divides
    by (torch's default, TRL's and verl's); the paper does not say. A group of one, or of equal rewards: 0.
    """
    groups = _groups(rewards_S, group_S)
    centred_S = groups.rewards_S - groups.mean_S
    if normalize_std:
        centred_S = centred_S / (groups.std(ddof) + eps)
    return _finish(rewards_S, groups, centred_S.masked_fill(groups.is_flat_S, 0.0))


def dr_grpo(rewards_S: Tensor, group_S: Tensor) -> Advantages:
    """r − mean of the group. Liu et al. 2025 ("Understanding R1-Zero-like training"): dividing by the std favours
    questions that are nearly always or nearly never solved."""
    return grpo(rewards_S, group_S, normalize_std=False)


def rloo(rewards_S: Tensor, group_S: Tensor) -> Advantages:
    """r − mean of the *other* rewards of the group = G/(G−1) (r − mean). Ahmadian et al. 2024. A group of one: 0."""
    groups = _groups(rewards_S, group_S)
    leave_one_out_S = (groups.rewards_S - groups.mean_S) * groups.size_S / (groups.size_S - 1).clamp(min=1)
    return _finish(rewards_S, groups, leave_one_out_S.masked_fill(groups.is_flat_S, 0.0))


def reinforce_plus_plus(rewards_S: Tensor, group_S: Tensor, *, eps: float = STD_EPS) -> Advantages:
    """(r − mean of the step) / (std of the step + eps), ddof 1: no group baseline.

    Hu 2025 (REINFORCE++). Implementations whiten over tokens; here a rollout counts once, whatever its length.
    """
    groups = _groups(rewards_S, group_S)
    return _finish(rewards_S, groups, _over_step(groups.rewards_S, eps))


def reinforce_plus_plus_baseline(rewards_S: Tensor, group_S: Tensor, *, eps: float = STD_EPS) -> Advantages:
    """(r − mean of the group) / (std over the step of these differences + eps). Hu 2025, the baseline variant."""
    groups = _groups(rewards_S, group_S)
    centred_S = (groups.rewards_S - groups.mean_S).masked_fill(groups.is_flat_S, 0.0)
    whitened_S = _over_step(centred_S, eps).masked_fill(groups.is_flat_S, 0.0)
    return _finish(rewards_S, groups, whitened_S)


def remax(rewards_S: Tensor, group_S: Tensor, *, greedy_rewards_S: Tensor) -> Advantages:
    """r − reward of the greedy answer to the same prompt, given per rollout. Li et al. 2023 (ReMax)."""
    groups = _groups(rewards_S, group_S)
    return _finish(rewards_S, groups, groups.rewards_S - greedy_rewards_S.double())


def grpo_passk(
    rewards_S: Tensor, group_S: Tensor, *, normalize_std: bool = True, ddof: int = 1, eps: float = STD_EPS
) -> Advantages:
    """Only the best rollout of a group: its lead over the second best, over (std + eps) if asked for; the others 0.

    Estimates the gradient of E[max of the group] with a leave-one-out baseline: Tang et al. 2025, "Optimizing language
    models for inference time objectives using reinforcement learning" (arXiv 2503.19595); the division by the
    standard deviation is verl's (its `grpo_passk`).
    A tie for the best, or a group of one: 0.
    """
    groups = _groups(rewards_S, group_S)
    num_groups = int(groups.index_S.max()) + 1 if len(groups.index_S) else 0
    best_S = rollout_max(groups.rewards_S, groups.index_S, num_groups)[groups.index_S]
    is_best_S = groups.rewards_S == best_S
    is_only_best_S = is_best_S & (rollout_sum(is_best_S.double(), groups.index_S, num_groups)[groups.index_S] == 1)
    others_S = groups.rewards_S.masked_fill(is_best_S, -torch.inf)
    second_S = rollout_max(others_S, groups.index_S, num_groups)[groups.index_S]
    lead_S = groups.rewards_S - second_S
    if normalize_std:
        lead_S = lead_S / (groups.std(ddof) + eps)
    return _finish(rewards_S, groups, lead_S.masked_fill(~is_only_best_S | groups.is_flat_S, 0.0))


ADVANTAGES: dict[str, Callable[..., Advantages]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "grpo_passk": grpo_passk,
}


def _over_step(values_S: Tensor, eps: float) -> Tensor:
    """Whitened over all rollouts of the step, sample deviation; all 0 when they are all equal."""
    if len(values_S) == 0 or bool((values_S == values_S[0]).all()):
        return torch.zeros_like(values_S)
    return (values_S - values_S.mean()) / (values_S.std() + eps)


def _finish(rewards_S: Tensor, groups: _Groups, advantages_S: Tensor) -> Advantages:
    return Advantages(advantages_S.to(rewards_S.dtype), groups.metrics)
