"""Policy gradient on the tokens of highest entropy (Wang et al. 2025, "Beyond the 80/20 Rule", arXiv 2506.01939)."""

import math
from typing import TYPE_CHECKING, Annotated

from lockstep.trainer.objective.declare import policy_loss
from lockstep.trainer.objective.losses.inputs import CLIP_HIGH, CLIP_LOW, LossInputs, LossOutputs, StepInputs
from lockstep.trainer.objective.losses.ppo_clip import masked_surrogate
from lockstep.trainer.objective.losses.whole_step.selection import largest
from lockstep.trainer.setting import Setting

if TYPE_CHECKING:
    from torch import Tensor


def entropy_mask(inputs: StepInputs, *, entropy_fraction: float, **_: float) -> "dict[str, Tensor]":
    """Return 1 for tokens at or above the (1 − entropy_fraction) quantile of the step's entropies, else 0."""
    assert inputs.entropy_N is not None
    below = math.ceil((1 - entropy_fraction) * (len(inputs.entropy_N) - 1) - 1e-9)
    return {"mask": largest(inputs.entropy_N, len(inputs.entropy_N) - below).to(inputs.logp_N.dtype)}


@policy_loss(step_values=entropy_mask, needs_entropy=True)
def top_entropy(
    inputs: LossInputs,
    *,
    clip_low: Annotated[float, CLIP_LOW],
    clip_high: Annotated[float, CLIP_HIGH],
    entropy_fraction: Annotated[
        float,
        Setting(default=0.2, description="top_entropy: share of the step's tokens that are trained", above=0, high=1),
    ],
) -> LossOutputs:
    """l = −M min(r A, clip(r, 1 − clip_low, 1 + clip_high) A), r = π_θ / π_old; M = 1 for the share `entropy_fraction`
    of the step's tokens with the highest entropy of π_θ.

    Equation 5 of the paper: few tokens of high entropy decide where a chain of thought goes on, and training on them
    alone does as well or better. Masked tokens stay in the denominator. Entropies cost one more pass per update.
    """
    return masked_surrogate(inputs, clip_low=clip_low, clip_high=clip_high)
