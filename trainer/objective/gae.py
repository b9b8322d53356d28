"""Generalized advantage estimation (GAE), and returns over turns.

The successor of a token is the next *trained* token of its rollout: tool results and user turns in between are not
decisions of the policy. The last token has no successor and no bootstrap.

    δ_t = r_t + γ V_next(t) − V_t        A_t = δ_t + γ λ A_next(t)        return_t = A_t + V_t

Source: Schulman et al. 2015 (arXiv 1506.02438), equations 11 and 16.

Dimensions: `_B` rows of a padded batch, `_T` tokens (of a padded row, or flat), `_S` rollouts, `_K` turns, flat.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from lockstep.trainer.objective.per_rollout import rollout_count

if TYPE_CHECKING:
    from torch import Tensor


class GaeResult(NamedTuple):
    advantages: Tensor
    returns: Tensor
    """Advantages plus values, before any whitening: the targets of the value function."""


def gae(rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, *, gamma: float, lam: float | Tensor) -> GaeResult:
    """Return (B, T) advantages and returns; both 0 where the mask is false.

    Args:
        rewards_BT, values_BT: read where `mask_BT` is true; other entries (padding, even NaN) have no effect.
        mask_BT: bool, the trained tokens; may have holes and be empty.
        gamma, lam: discount and λ, both in [0, 1]; lam may be (B,), one per row.
    """
    assert rewards_BT.shape == values_BT.shape == mask_BT.shape, "gae: expected three tensors of one shape (B, T)"
    mask_BT = mask_BT.bool()
    rewards_BT = rewards_BT.masked_fill(~mask_BT, 0.0)
    values_BT = values_BT.masked_fill(~mask_BT, 0.0)
    next_value_B = values_BT.new_zeros(len(values_BT))
    next_advantage_B = values_BT.new_zeros(len(values_BT))
    advantages_BT = values_BT.new_zeros(values_BT.shape)
    for t in range(values_BT.shape[1] - 1, -1, -1):
        delta_B = rewards_BT[:, t] + gamma * next_value_B - values_BT[:, t]
        advantage_B = delta_B + gamma * lam * next_advantage_B
        # An untrained token keeps the successor of the token after it: the hole is skipped.
        next_value_B = values_BT[:, t].where(mask_BT[:, t], next_value_B)
        next_advantage_B = advantage_B.where(mask_BT[:, t], next_advantage_B)
        advantages_BT[:, t] = advantage_B.masked_fill(~mask_BT[:, t], 0.0)
    return GaeResult(advantages_BT, advantages_BT + values_BT)


def gae_flat(
    rewards_T: Tensor,
    values_T: Tensor,
    rollout_T: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
    turn_T: Tensor | None = None,
) -> GaeResult:
    """Return (T,) advantages and returns of the trained tokens of whole rollouts, which may be mixed.

    lam: λ, or the (T,) λ of each token's rollout.

    Within a rollout tokens are in flat order or, given `turn_T` (the call that sampled each token), sorted by turn and
    then in flat order: rows of a rollout may then come in any order and hold interleaved turns.
    """
    place_T = rollout_T.new_ones(len(rollout_T)).cumsum(0) - 1
    order_T = place_T if turn_T is None else turn_T.argsort(stable=True)
    order_T = order_T[rollout_T[order_T].argsort(stable=True)]

    names_S, row_T = rollout_T[order_T].unique_consecutive(return_inverse=True)
    count_S = rollout_count(row_T, len(names_S))
    start_S = count_S.cumsum(0) - count_S
    column_T = place_T - start_S[row_T]
    shape = (len(names_S), int(count_S.max()) if len(names_S) else 0)

    def padded(x_T: Tensor) -> Tensor:
        return x_T.new_zeros(shape).index_put((row_T, column_T), x_T[order_T])

    mask = padded(rollout_T == rollout_T)
    lam_S = lam if isinstance(lam, float | int) else lam[order_T][start_S]
    result = gae(padded(rewards_T), padded(values_T), mask, gamma=gamma, lam=lam_S)

    def flat(x: Tensor) -> Tensor:
        x_T = values_T.new_empty(values_T.shape)
        x_T[order_T] = x[row_T, column_T]
        return x_T

    return GaeResult(flat(result.advantages), flat(result.returns))


def length_adaptive_lambda(rollout_T: Tensor, *, alpha: float) -> Tensor:
    """Return (T,) float64 1 − 1 / (alpha · l), l the number of trained tokens of the token's rollout; 0 below 0.

    Yue et al. 2025 (VAPO, arXiv 2504.05118), section 4.2: the weights λ^t of the TD errors then sum to about alpha · l,
    so that long rollouts are not blind to a reward at their end.

    rollout_T: rollouts of all trained tokens, of all rows of a rollout; a part of them would be a shorter rollout.
    """
    _, index_T, length_S = rollout_T.unique(return_inverse=True, return_counts=True)
    return (1 - 1 / (alpha * length_S[index_T].double())).clamp(min=0.0)
