"""Clip-Cov (Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models")."""

from typing import TYPE_CHECKING, Annotated

from lockstep.trainer.objective.declare import policy_loss
from lockstep.trainer.objective.losses.inputs import CLIP_HIGH, CLIP_LOW, LossInputs, LossOutputs, StepInputs
from lockstep.trainer.objective.losses.ppo_clip import masked_surrogate
from lockstep.trainer.objective.losses.whole_step.selection import covariances
from lockstep.trainer.setting import Setting

if TYPE_CHECKING:
    from torch import Tensor

COV_FRACTION = Setting(
    default=2e-4,
    description="clip_cov, kl_cov: share of the step's tokens that are picked; at least one",
    above=0,
    high=1,
)


def covariance_mask(
    inputs: StepInputs, *, clip_low: float, clip_high: float, cov_fraction: float, cov_low: float, cov_high: float
) -> "dict[str, Tensor]":
    """Return 0 for tokens drawn at random from those with a covariance in (cov_low, cov_high) that are not clipped."""
    import torch  # settings are checked before it is imported

    ratio_N = (inputs.logp_N - inputs.old_logp_N).double().exp()
    is_clipped_N = (inputs.advantages_N > 0) & (ratio_N > 1 + clip_high)
    is_clipped_N |= (inputs.advantages_N < 0) & (ratio_N < 1 - clip_low)
    cov_N = covariances(inputs.logp_N, inputs.advantages_N)
    is_candidate_N = (cov_N > cov_low) & (cov_N < cov_high) & ~is_clipped_N
    mask_N = inputs.logp_N.new_ones(len(cov_N))
    # The order is drawn for all tokens: a candidate more or less does not change the choice among the others.
    order = torch.randperm(len(cov_N), generator=torch.Generator().manual_seed(inputs.seed))
    indices = order[is_candidate_N[order]][: max(int(cov_fraction * len(cov_N)), 1)]
    mask_N[indices] = 0
    return {"mask": mask_N}


@policy_loss(step_values=covariance_mask)
def clip_cov(
    inputs: LossInputs,
    *,
    clip_low: Annotated[float, CLIP_LOW],
    clip_high: Annotated[float, CLIP_HIGH],
    cov_fraction: Annotated[float, COV_FRACTION],
    cov_low: Annotated[
        float, Setting(default=1.0, description="clip_cov: covariance above which a token may be picked")
    ],
    cov_high: Annotated[
        float, Setting(default=5.0, description="clip_cov: covariance below which a token may be picked")
    ],
) -> LossOutputs:
    """l = −M min(r A, clip(r, 1 − clip_low, 1 + clip_high) A), r = π_θ / π_old; M = 0 for a random share `cov_fraction`
    of the step's tokens, from those with cov_low < (logp − mean logp)(A − mean A) < cov_high.

    Equations 10 to 12 of the paper (arXiv 2505.22617): a small share of tokens with a high covariance of logprob and
    advantage drives the collapse of entropy. Means are over the step; the draw depends on seed and update only.
    """
    return masked_surrogate(inputs, clip_low=clip_low, clip_high=clip_high)
