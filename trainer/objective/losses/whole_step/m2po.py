"""M2PO (Zheng et al. 2025, "Prosperity before Collapse", arXiv 2510.01161): bound the second moment of log ratios."""

from typing import TYPE_CHECKING, Annotated

from lockstep.trainer.objective.declare import policy_loss
from lockstep.trainer.objective.losses.inputs import (
    LossInputs,
    LossOutputs,
    StepInputs,
    common_metrics,
    count,
    sampling_ratio,
)
from lockstep.trainer.objective.losses.whole_step.selection import threshold_below
from lockstep.trainer.setting import Setting

if TYPE_CHECKING:
    from torch import Tensor


def second_moment_mask(inputs: StepInputs, *, m2_budget: float) -> "dict[str, Tensor]":
    """Return 0 for the tokens of the largest (log r)² whose removal brings the mean of the others to the budget.

    Only tokens whose update moves r further away from 1 count and are masked: A > 0 and r > 1, or A < 0 and r < 1.
    """
    log_ratio_N = (inputs.logp_N - inputs.sampling_logp_N).double()
    leaves_N = inputs.advantages_N * log_ratio_N > 0
    squares_N = log_ratio_N.square()
    ascending = squares_N[leaves_N].sort().values
    # Means of the smallest 1, 2, … never fall, so those within the budget come first.
    running_mean = ascending.cumsum(0) / ascending.new_ones(len(ascending)).cumsum(0)
    num_kept = int((running_mean <= m2_budget).sum())
    mask_N = inputs.logp_N.new_ones(len(squares_N))
    if num_kept < len(ascending):
        mask_N[leaves_N & (squares_N >= threshold_below(ascending[num_kept]))] = 0
    return {"mask": mask_N}


@policy_loss(step_values=second_moment_mask, weighs_by_sampling=True)
def m2po(
    inputs: LossInputs,
    *,
    m2_budget: Annotated[
        float, Setting(default=0.04, description="m2po: bound of the mean of (log r)^2 over the step", above=0)
    ],
) -> LossOutputs:
    """l = −M r A, r = π_θ / μ per token; M = 0 for the tokens with the largest (log r)² of the step, as few as bring
    the mean of (log r)² over the others to m2_budget.

    Means and mask are over the tokens that the update moves away from μ (A > 0 and r > 1, or A < 0 and r < 1); others
    are always trained. Unlike a clip range, the budget leaves all tokens of a mildly off-policy step in place, and
    takes the outliers of a stale one.
    """
    ratio_T = sampling_ratio(inputs)
    mask_T = inputs.step_values["mask"]
    metrics = {"policy/step_mask_frac": count(mask_T == 0), **common_metrics(inputs, ratio_T)}
    return LossOutputs(loss_T=-mask_T * ratio_T * inputs.advantages_T, metrics=metrics)
