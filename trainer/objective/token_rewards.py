"""Rewards per token for PPO: a KL penalty on every token, the reward of a turn on its last one.

    r_t = −β (log π_t − log π_ref,t)  +  reward of the turn, at its last trained token

Without `algorithm.turn_rewards` the whole score belongs to the last turn. The penalty is against the frozen reference,
from logprobs at the start of the update, once per rollout batch. (The example in "The N Implementation Details of RLHF
with PPO", Hugging Face blog, 2023, adds β · kl against an earlier policy; sign and reference are wrong there. The code
that it describes, github.com/openai/lm-human-preferences, computes the formula above.)

Dimensions: `_T` trained tokens of the step, in any order, `_S` rollouts, `_K` turns of all rollouts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.trainer.objective.per_rollout import rollout_sum


class TurnRewards(NamedTuple):
    reward_K: Tensor
    rollout_K: Tensor
    """int64"""
    turn_K: Tensor
    """int64 index of the call within the rollout."""


class TokenRewards(NamedTuple):
    rewards_T: Tensor
    penalty_T: Tensor
    """−β kl alone."""
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
    """Return the rewards of all trained tokens; the reward of a turn with no trained token before its end is dropped.

    Args:
        logp_T, ref_logp_T: logprobs at the sampling temperature.
        rollout_T: int64 rollout of each token.
        turn_T: int64 call that sampled the token; within a call tokens are in flat order.
    """
    kl_T = logp_T - ref_logp_T
    penalty_T = -kl_coef * kl_T
    last_K = last_token(turns.rollout_K, turns.turn_K, rollout_T, turn_T)
    has_token_K = last_K >= 0
    turn_rewards = turns.reward_K[has_token_K].to(penalty_T.dtype)
    rewards_T = penalty_T.index_add(0, last_K[has_token_K], turn_rewards)
    return TokenRewards(rewards_T, penalty_T, rollout_sum(kl_T, rollout_T, num_rollouts))


def last_token(rollout_K: Tensor, turn_K: Tensor, rollout_T: Tensor, turn_T: Tensor) -> Tensor:
    """Return (K,) the flat index of the last trained token up to the end of each turn; −1 if there is none.

    Where no token of the turn is trained, it belongs to an earlier turn of the rollout.
    """
    if not len(rollout_T):
        return torch.full_like(rollout_K, -1)
    stride = int(torch.cat([turn_K, turn_T]).max()) + 1
    sorted_T, order_T = torch.sort(rollout_T * stride + turn_T, stable=True)
    place_K = torch.searchsorted(sorted_T, rollout_K * stride + turn_K, right=True) - 1
    index_K = order_T[place_K.clamp(min=0)]
    return torch.where((place_K >= 0) & (rollout_T[index_K] == rollout_K), index_K, -1)
