"""Credit per turn: discounted returns of turns, compared with the same turn of the group, spread over tokens.

A turn is one engine call. Turns of all rollouts are flat, `_K`; those of a rollout are in the order of the calls. The
comparison with the same turn of the other rollouts of the group follows Zeng et al. 2025 ("Reinforcing multi-turn
reasoning in LLM agents via turn-level credit assignment"). A turn that only one rollout of the group reached gets 0.
`trainer/credit/targets.py` combines these functions.
"""

from __future__ import annotations

import torch
from torch import Tensor


def discounted_returns(rewards_K: Tensor, rollout_K: Tensor, *, gamma: float) -> Tensor:
    """Return (K,) Σ_{j ≥ k} gamma^(j−k) r_j over the turns of the same rollout."""
    from lockstep.trainer.objective.gae import gae_flat  # runs without turn rewards do not load it

    return gae_flat(rewards_K, torch.zeros_like(rewards_K), rollout_K, gamma=gamma, lam=1.0).returns


def turn_groups(group_K: Tensor, turn_K: Tensor) -> Tensor:
    """Return (K,) int64 group numbers: two turns share one if their prompt group and turn index are the same."""
    return torch.unique(torch.stack([group_K, turn_K], dim=1), dim=0, return_inverse=True)[1]


def spread_turns(values_K: Tensor, rollout_K: Tensor, turn_K: Tensor, rollout_T: Tensor, turn_T: Tensor) -> Tensor:
    """Return (T,) the value of each token's turn.

    Raises:
        ValueError: a turn is given twice, or a token's turn is missing.
    """
    stride = int(torch.cat([turn_K, turn_T]).max()) + 1 if len(turn_K) + len(turn_T) else 1
    sorted_K, order_K = torch.sort(rollout_K * stride + turn_K)
    if (sorted_K[1:] == sorted_K[:-1]).any():
        raise ValueError("turn values: a turn of a rollout is given twice")
    wanted_T = rollout_T * stride + turn_T
    where_T = torch.searchsorted(sorted_K, wanted_T)
    found_T = where_T < len(sorted_K)
    if not found_T.all() or not torch.equal(sorted_K[where_T], wanted_T):
        raise ValueError("turn values: some tokens belong to a turn that has no value")
    return values_K[order_K[where_T]]
