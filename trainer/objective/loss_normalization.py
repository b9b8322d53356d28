"""Loss normalization: one denominator per optimizer step, independent of ranks and microbatches.

    loss = Σ_t c_t · l_t / D        over all trained tokens of the step, on all ranks

| name           | c_t        | D            |                                                             |
|----------------|------------|--------------|-------------------------------------------------------------|
| `grpo`         | 1 / \\|T_s\\| | N_seq        | mean over rollouts of the mean over their tokens            |
| `dr_grpo`      | 1          | N_seq · H    | H the configured maximum completion length (Liu et al. 2025) |
| `token`        | 1          | N_tok        | DAPO (Yu et al. 2025); the intent of BNPO, but globally     |
| `sequence_sum` | 1          | N_seq        |                                                             |

N_seq counts all rollouts delivered to the step, also those whose tokens are all masked or rejected: otherwise the
weight of a rollout would depend on the masks of others. N_tok and |T_s| count tokens of the loss mask, over all rows of
a rollout and all ranks, after rejection; correction weights of 0 do not change them. D = 0 (no rollouts, or all tokens
masked under `token`) gives loss 0 with zero gradients, not NaN.

Source: "Reinforcement Learning Loss Normalization" (note); where its text and code disagree, the table above holds.
Dimensions: `_T` trained tokens of a microbatch, `_S` rollouts of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """Counts of an optimizer step over ranks, microbatches and packs, taken once before the first backward."""

    num_rollouts: int
    """N_seq."""
    num_tokens: int
    """N_tok."""
    max_completion_length: int
    """H [tokens]; only `dr_grpo` reads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalizer:
    """A row of the table above."""

    per_rollout_mean: bool
    """True for c_t = 1 / |T_s|, False for c_t = 1."""
    denominator: Callable[[StepCounts], int]


NORMALIZERS: dict[str, Normalizer] = {
    "grpo": Normalizer(per_rollout_mean=True, denominator=lambda counts: counts.num_rollouts),
    "dr_grpo": Normalizer(
        per_rollout_mean=False, denominator=lambda counts: counts.num_rollouts * counts.max_completion_length
    ),
    "token": Normalizer(per_rollout_mean=False, denominator=lambda counts: counts.num_tokens),
    "sequence_sum": Normalizer(per_rollout_mean=False, denominator=lambda counts: counts.num_rollouts),
}


def loss_coefficients(
    name: str, rollout_T: Tensor, tokens_per_rollout_S: Tensor, counts: StepCounts, *, dtype: torch.dtype
) -> Tensor:
    """Return (T,) c_t / D for the tokens of a microbatch.

    A caller whose framework averages gradients over P ranks multiplies by P.

    Args:
        name: a key of `NORMALIZERS`.
        tokens_per_rollout_S: |T_s|.
    """
    normalizer = NORMALIZERS[name]
    denominator = normalizer.denominator(counts)
    scale = 1.0 / denominator if denominator else 0.0
    if not normalizer.per_rollout_mean:
        return rollout_T.new_full(rollout_T.shape, scale, dtype=dtype)
    coef_S = scale / tokens_per_rollout_S.double().clamp(min=1)
    return coef_S[rollout_T].to(dtype)


def normalized_loss(loss_T: Tensor, coefficient_T: Tensor) -> Tensor:
    """Return the microbatch's share of the loss of the step; 0 with zero gradients if it holds no tokens."""
    return (loss_T * coefficient_T).sum()
