"""GSPO (Zheng et al. 2025, "Group Sequence Policy Optimization"): clipping by the ratio of the whole rollout."""

from typing import Annotated

from lockstep.trainer.objective.declare import policy_loss
from lockstep.trainer.objective.losses.inputs import (
    CLIP_HIGH,
    CLIP_LOW,
    LossInputs,
    LossOutputs,
    common_metrics,
    plain_log_ratio,
    sequence_ratio,
    weighted,
)
from lockstep.trainer.objective.losses.ppo_clip import clipped_surrogate


@policy_loss(sequence_log_ratio=plain_log_ratio)
def gspo(
    inputs: LossInputs, *, clip_low: Annotated[float, CLIP_LOW], clip_high: Annotated[float, CLIP_HIGH]
) -> LossOutputs:
    """l_t = −min(s A_t, clip(s, 1 − clip_low, 1 + clip_high) A_t), s the geometric mean ratio of the rollout.

    s = (π_θ(y) / π_old(y))^(1/|y|) moves little: the paper's experiments have clip_low = 3e-4 and clip_high = 4e-4.
    With the `grpo` normalizer and one advantage and weight per rollout, the gradient is A s mean_t ∇logp_t: GSPO. With
    advantages or weights per token it is s mean_t(w_t A_t ∇logp_t): GSPO-token, of which GSPO is the special case (the
    paper's section 4.3).
    """
    ratio_T = sequence_ratio(inputs, inputs.logp_T - inputs.old_logp_T.detach())
    loss_T, metrics = clipped_surrogate(ratio_T, inputs.advantages_T, clip_low=clip_low, clip_high=clip_high)
    return LossOutputs(loss_T=weighted(loss_T, inputs), metrics=metrics | common_metrics(inputs, ratio_T))
