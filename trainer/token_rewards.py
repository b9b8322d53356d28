"""Rewards per token for PPO: the score where the episode ends, a KL penalty everywhere.

    r_t = −β (log π_t − log π_ref,t)  +  score, at the last trained token

The penalty is against the frozen reference, from logprobs at the start of the update, once per rollout batch. (Seed
003's example adds β · kl, of the policy against its own earlier self: its sign and its reference are both wrong; the
code it describes does what stands here.)

Everything is flat, one entry per trained token of the step, in any order; `turn_T` orders the calls of a rollout.
Dimensions: `_T` trained tokens, `_S` rollouts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trainer.segments import rollout_max, rollout_sum


class TokenRewards(NamedTuple):
    rewards_T: Tensor
    penalty_T: Tensor
    """−β kl alone: the part of the reward that is not score."""
    kl_S: Tensor
    """Sum over the rollout's tokens of log π − log π_ref [nats]."""


def token_rewards(
    scores_S: Tensor, logp_T: Tensor, ref_logp_T: Tensor, rollout_T: Tensor, turn_T: Tensor, *, kl_coef: float
) -> TokenRewards:
    """Rewards of all trained tokens; a rollout without any keeps its score to itself.

    Args:
        scores_S: score of each rollout.
        logp_T, ref_logp_T: at the temperature that was sampled with, both.
        rollout_T: int64 rollout of each token.
        turn_T: int64 call that sampled the token; within a call tokens are in flat order.
    """
    num_rollouts = len(scores_S)
    kl_T = logp_T - ref_logp_T
    penalty_T = -kl_coef * kl_T
    rewards_T = penalty_T.clone()
    last_S = last_token(rollout_T, turn_T, num_rollouts)
    has_tokens_S = last_S >= 0
    rewards_T[last_S[has_tokens_S]] += scores_S[has_tokens_S].to(rewards_T.dtype)
    return TokenRewards(rewards_T, penalty_T, rollout_sum(kl_T, rollout_T, num_rollouts))


def last_token(rollout_T: Tensor, turn_T: Tensor, num_rollouts: int) -> Tensor:
    """(S,) flat index of each rollout's last token: of its last call, the last in flat order; −1 without tokens."""
    last_turn_S = rollout_max(turn_T.double(), rollout_T, num_rollouts)
    place_T = torch.arange(len(rollout_T), device=rollout_T.device)
    in_last_turn_T = turn_T == last_turn_S[rollout_T]
    last_S = place_T.new_full((num_rollouts,), -1)
    return last_S.scatter_reduce(0, rollout_T[in_last_turn_T], place_T[in_last_turn_T], reduce="amax")
