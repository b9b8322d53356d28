"""Inputs and outputs of an advantage estimator, and statistics of groups.

Dimensions: `_S` rollouts (or turns, where turns are compared), `_G` groups.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from lockstep.rollout.errors import RewardError
from lockstep.trainer.objective.per_rollout import rollout_count, rollout_max, rollout_sum
from lockstep.trainer.setting import Setting

if TYPE_CHECKING:
    from torch import Tensor

STD = Setting(default=True, description="divide by the standard deviation of the group's rewards")
DDOF = Setting(default=1, description="1: sample, 0: population standard deviation", choices=(0, 1))
EPS = Setting(default=1e-6, description="added to the standard deviation that advantages are divided by", low=0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RewardTerms:
    """Rewards of a step by reward function `_F`."""

    rewards_SF: Tensor
    """Before the weights; NaN: the function does not apply to the rollout."""
    weights_F: Tensor

    def __post_init__(self) -> None:
        if self.rewards_SF.ndim != 2 or self.rewards_SF.shape[1:] != self.weights_F.shape:
            raise ValueError(
                f"rewards by function {tuple(self.rewards_SF.shape)} and weights {tuple(self.weights_F.shape)}; "
                "expected one weight per column"
            )
        if self.rewards_SF.isinf().any() or not self.weights_F.isfinite().all():
            raise RewardError(
                "rewards by function or their weights are infinite; expected finite numbers, or NaN where "
                "a function does not apply"
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TurnInputs:
    """Turns `_K` of all rollouts of a step."""

    returns_K: Tensor
    """Discounted sums of the rewards from each turn on."""
    rollout_K: Tensor
    """int64"""
    state_K: Tensor
    """int64 state before the turn; equal numbers are one state of one group."""

    def __post_init__(self) -> None:
        if not self.returns_K.shape == self.rollout_K.shape == self.state_K.shape:
            raise ValueError(
                f"returns {tuple(self.returns_K.shape)}, rollouts {tuple(self.rollout_K.shape)} and states "
                f"{tuple(self.state_K.shape)} of turns must be flat and of one length"
            )
        if bool((self.state_K < 0).any()):
            raise ValueError("turns without a state cannot be compared")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdvantageInputs:
    """Rewards of a step.

    Raises:
        ValueError: shapes that differ.
        RewardError: a reward that is not finite.
    """

    rewards_S: Tensor
    group_S: Tensor
    """int64 group of each rollout, in any order."""
    greedy_rewards_S: Tensor | None = None
    """Reward of the greedy answer to the same prompt, for estimators with `needs_greedy`."""
    terms: RewardTerms | None = None
    """Rewards by function; None where turns are compared."""
    turns: TurnInputs | None = None
    """For estimators with `needs_states`."""

    def __post_init__(self) -> None:
        if self.terms is not None and len(self.terms.rewards_SF) != len(self.rewards_S):
            raise ValueError(
                f"rewards by function of {len(self.terms.rewards_SF)} rollouts for {len(self.rewards_S)} rewards"
            )
        if self.rewards_S.ndim != 1 or self.rewards_S.shape != self.group_S.shape:
            raise ValueError(
                f"rewards {tuple(self.rewards_S.shape)} and groups {tuple(self.group_S.shape)} must be flat and of one "
                "length, one entry per rollout"
            )
        finite_S = self.rewards_S.isfinite()
        if not finite_S.all():
            where = int((~finite_S).nonzero()[0])
            raise RewardError(
                f"the reward of rollout {where} (group {int(self.group_S[where])}) is {float(self.rewards_S[where])}; "
                "expected a finite number: a reward function must fail instead of returning it"
            )


class Advantages(NamedTuple):
    advantages_S: Tensor
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupStatistics:
    """Rewards in float64, and statistics of each rollout's group."""

    rewards_S: Tensor
    index_S: Tensor
    """Groups renumbered from 0."""
    num_groups: int
    size_S: Tensor
    mean_S: Tensor
    is_flat_S: Tensor
    """bool: all rewards of the group are equal."""
    metrics: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, inputs: AdvantageInputs) -> GroupStatistics:
        rewards_S = inputs.rewards_S.detach().double()
        names_G, index_S = inputs.group_S.unique(return_inverse=True)
        num_groups = len(names_G)
        size_G = rollout_count(index_S, num_groups)
        mean_G = rollout_sum(rewards_S, index_S, num_groups) / size_G
        is_flat_G = rollout_max(rewards_S, index_S, num_groups) == -rollout_max(-rewards_S, index_S, num_groups)
        return cls(
            rewards_S=rewards_S,
            index_S=index_S,
            num_groups=num_groups,
            size_S=size_G[index_S],
            mean_S=mean_G[index_S],
            is_flat_S=is_flat_G[index_S],
            metrics={"reward/zero_std_fraction": float(is_flat_G.double().mean()) if num_groups else 0.0},
        )

    def std(self, ddof: int) -> Tensor:
        """Return (S,) the standard deviation of the rewards of each rollout's group; 0 for at most ddof rewards."""
        squares_G = rollout_sum((self.rewards_S - self.mean_S).square(), self.index_S, self.num_groups)
        return (squares_G[self.index_S] / (self.size_S - ddof).clamp(min=1)).sqrt()

    def finish(self, advantages_S: Tensor, inputs: AdvantageInputs) -> Advantages:
        return Advantages(advantages_S.to(inputs.rewards_S.dtype), self.metrics)
