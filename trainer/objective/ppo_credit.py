"""PPO's credit: from scores, values and a KL penalty to an advantage and a return for each trained token.

    scores, log π, log π_ref ─► reward per token ─► (whitened) ─► GAE with V_old ─► returns = A + V_old
                                                                       └─► advantages (whitened)

Whitening belongs to the optimizer step: its statistics are those of the minibatch, and since whitened rewards change
the advantages, GAE is computed again for each minibatch. Returns come from the advantages before they are whitened,
because values are in the unit of rewards (P9).

Shape legend: _S rollouts of the step, _N trained tokens of the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.objective.gae import gae_flat
from trainer.objective.whitening import moments, standardize


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Credit:
    """What is needed to compute advantages for any part of a step. All detached, on CPU, the same on every rank."""

    rewards_N: Tensor
    """Of each token: the score where the rollout ends, less the KL penalty (trainer/objective/token_rewards.py)."""
    values_N: Tensor
    """Of the critic at the start of the update."""
    rollout_N: Tensor
    turns_N: Tensor
    keep_N: Tensor
    """bool: tokens of the loss mask; only they enter statistics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditRule:
    """How credit is given."""

    gamma: float = 1.0
    lam: float = 0.95
    whiten_rewards: bool = False
    whiten_advantages: bool = True


def assign(credit: Credit, chosen_N: Tensor, rule: CreditRule) -> tuple[Tensor, Tensor]:
    """(N,) advantages and returns of the chosen tokens, 0 elsewhere.

    Args:
        chosen_N: bool, all trained tokens of the rollouts of this optimizer step.

    A token that left the loss mask is still a decision on the way, so GAE passes through it; it has no part in the
    statistics of whitening.
    """
    counted_N = (chosen_N & credit.keep_N)[chosen_N]
    rewards, values = credit.rewards_N[chosen_N], credit.values_N[chosen_N]
    if rule.whiten_rewards:
        rewards = standardize(rewards, moments(rewards, counted_N), shift_mean=False)
    result = gae_flat(
        rewards,
        values,
        credit.rollout_N[chosen_N],
        gamma=rule.gamma,
        lam=rule.lam,
        turn_T=credit.turns_N[chosen_N],
    )
    advantages = result.advantages
    if rule.whiten_advantages:
        advantages = standardize(advantages, moments(advantages, counted_N), shift_mean=True)

    def spread(chosen: Tensor) -> Tensor:
        return torch.zeros_like(credit.rewards_N).masked_scatter(chosen_N, chosen)

    return spread(advantages), spread(result.returns)
