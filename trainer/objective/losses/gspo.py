"""GSPO (Zheng et al. 2025, "Group Sequence Policy Optimization"): clipping by the ratio of the whole rollout."""

from __future__ import annotations

from trainer.objective.losses.inputs import LossInputs, LossOutputs, common_metrics, sequence_ratio, weighted
from trainer.objective.losses.ppo_clip import clipped_surrogate


def gspo(inputs: LossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> LossOutputs:
    """l_t = −min(s A_t, clip(s, 1 − clip_low, 1 + clip_high) A_t), s the geometric mean ratio of the rollout.

    s = (π_θ(y) / π_old(y))^(1/|y|); the bounds are those of the paper's experiments, s moves that little. With the
    `grpo` normaliser and one advantage and weight per rollout, the gradient is A s mean_t ∇logp_t: GSPO. Advantages or
    weights that differ between tokens make it s mean_t(w_t A_t ∇logp_t): GSPO-token, of which GSPO is the special
    case (the paper's section 4.3). Exact over microbatches when `inputs.seq_log_ratio_S` is given.
    """
    ratio_T = sequence_ratio(inputs)
    loss_T, metrics = clipped_surrogate(ratio_T, inputs.advantages_T, clip_low=clip_low, clip_high=clip_high)
    return LossOutputs(loss_T=weighted(loss_T, inputs), metrics=metrics | common_metrics(inputs, ratio_T))
