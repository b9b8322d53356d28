"""Rewards per token for PPO: what a turn earned where the turn ends, a KL penalty everywhere.

    r_t = −β (log π_t − log π_ref,t)  +  reward of the turn, at its last trained token

Without `algorithm.turn_rewards` the whole score is the last turn's. The penalty is against the frozen reference, from
logprobs at the start of the update, once per rollout batch. (Seed 003's example adds β · kl, of the policy against its
own earlier self: its sign and its reference are both wrong; the code it describes does what stands here.)

Everything is flat, one entry per trained token of the step, in any order; `turn_T` orders the calls of a rollout.
Dimensions: `_T` trained tokens, `_S` rollouts, `_K` turns of all rollouts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trainer.objective.per_rollout import rollout_sum


class TurnRewards(NamedTuple):
    """What each turn earned."""

    reward_K: Tensor
    rollout_K: Tensor
    """int64"""
    turn_K: Tensor
    """int64 call of the rollout."""


class TokenRewards(NamedTuple):
    rewards_T: Tensor
    penalty_T: Tensor
    """−β kl alone: the part of the reward that no turn earned."""
    kl_S: Tensor
    """Sum over the rollout's tokens of log π − log π_ref [nats]."""


def token_rewards(
    turns: TurnRewards,
    logp_T: Tensor,
    ref_logp_T: Tensor,
    rollout_T: Tensor,
    turn_T: Tensor,
    *,
    num_rollouts: int,
    kl_coef: float,
) -> TokenRewards:
    """Rewards of all trained tokens; a turn with no trained token before its end keeps its reward to itself.

    Args:
        turns: of each rollout.
        logp_T, ref_logp_T: at the temperature that was sampled with, both.
        rollout_T: int64 rollout of each token.
        turn_T: int64 call that sampled the token; within a call tokens are in flat order.
    """
    kl_T = logp_T - ref_logp_T
    penalty_T = -kl_coef * kl_T
    last_K = last_token(turns.rollout_K, turns.turn_K, rollout_T, turn_T)
    has_token_K = last_K >= 0
    earned = turns.reward_K[has_token_K].to(penalty_T.dtype)
    rewards_T = penalty_T.index_add(0, last_K[has_token_K], earned)
    return TokenRewards(rewards_T, penalty_T, rollout_sum(kl_T, rollout_T, num_rollouts))


def last_token(rollout_K: Tensor, turn_K: Tensor, rollout_T: Tensor, turn_T: Tensor) -> Tensor:
    """(K,) flat index of the last token that a rollout had sampled when a turn ended; −1: it had none.

    Usually the turn's own last one, and of an earlier turn where nothing of this one is trained.
    """
    if not len(rollout_T):
        return torch.full_like(rollout_K, -1)
    stride = int(torch.cat([turn_K, turn_T]).max()) + 1
    sorted_T, order_T = torch.sort(rollout_T * stride + turn_T, stable=True)
    place_K = torch.searchsorted(sorted_T, rollout_K * stride + turn_K, right=True) - 1
    index_K = order_T[place_K.clamp(min=0)]
    return torch.where((place_K >= 0) & (rollout_T[index_K] == rollout_K), index_K, -1)
