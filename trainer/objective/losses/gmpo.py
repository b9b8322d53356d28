"""GMPO (Zhao et al. 2025, "Geometric-Mean Policy Optimization", arXiv 2507.20673)."""

import math
from typing import TYPE_CHECKING, Annotated

from lockstep.trainer.objective.declare import policy_loss
from lockstep.trainer.objective.losses.inputs import (
    CLIP_HIGH,
    CLIP_LOW,
    LossInputs,
    LossOutputs,
    common_metrics,
    count,
    sequence_ratio,
    weighted,
)

if TYPE_CHECKING:
    from torch import Tensor


def clipped_log_ratio(log_ratio_T: "Tensor", advantages_T: "Tensor", *, clip_low: float, clip_high: float) -> "Tensor":
    """Return log r, bounded above by log(1 + clip_high) where A > 0 and below by log(1 − clip_low) where A < 0."""
    capped_T = log_ratio_T.clamp(max=math.log1p(clip_high))
    return capped_T.where(advantages_T > 0, log_ratio_T.clamp(min=math.log1p(-clip_low)))


@policy_loss(sequence_log_ratio=clipped_log_ratio)
def gmpo(
    inputs: LossInputs, *, clip_low: Annotated[float, CLIP_LOW], clip_high: Annotated[float, CLIP_HIGH]
) -> LossOutputs:
    """l_t = −s A_t, s = (Π_t clip(r_t))^(1/|y|), the geometric mean of the clipped token ratios of the rollout.

    Equation 4 of the paper: A > 0 bounds r above, A < 0 below; the paper's bounds are e^±0.4. With the `grpo`
    normalizer the gradient is A s mean_t(∇logp_t) over the tokens that are not clipped.
    """
    log_ratio_T = inputs.logp_T - inputs.old_logp_T.detach()
    bounded_T = clipped_log_ratio(log_ratio_T, inputs.advantages_T, clip_low=clip_low, clip_high=clip_high)
    ratio_T = sequence_ratio(inputs, bounded_T)
    metrics = {"policy/clip_frac": count(bounded_T.ne(log_ratio_T)), **common_metrics(inputs, ratio_T)}
    return LossOutputs(loss_T=weighted(-ratio_T * inputs.advantages_T, inputs), metrics=metrics)
