"""KL-Cov (Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models")."""

from typing import TYPE_CHECKING, Annotated

from lockstep.trainer.objective.declare import policy_loss
from lockstep.trainer.objective.losses.inputs import (
    LossInputs,
    LossOutputs,
    StepInputs,
    common_metrics,
    count,
    token_ratio,
    weighted,
)
from lockstep.trainer.objective.losses.whole_step.clip_cov import COV_FRACTION
from lockstep.trainer.objective.losses.whole_step.selection import covariances, largest
from lockstep.trainer.setting import Setting

if TYPE_CHECKING:
    from torch import Tensor


def picked_tokens(inputs: StepInputs, *, cov_fraction: float, **_: float) -> "dict[str, Tensor]":
    """Return 1 for the tokens with the largest covariances, else 0."""
    cov_N = covariances(inputs.logp_N, inputs.advantages_N)
    picked_N = largest(cov_N, max(int(cov_fraction * len(cov_N)), 1))
    return {"picked": picked_N.to(inputs.logp_N.dtype)}


@policy_loss(step_values=picked_tokens)
def kl_cov(
    inputs: LossInputs,
    *,
    cov_fraction: Annotated[float, COV_FRACTION],
    cov_kl_coef: Annotated[
        float, Setting(default=1.0, description="kl_cov: weight of |log r| at the picked tokens", low=0)
    ],
) -> LossOutputs:
    """l = −r A + cov_kl_coef P |log r|, r = π_θ / π_old; P = 1 for the share `cov_fraction` of the step's tokens with
    the largest (logp − mean logp)(A − mean A).

    Equations 10, 13 and 14 of the paper (arXiv 2505.22617), whose code estimates the KL by |log r|. There is no clip.
    In the first update of a batch log r = 0, and so is the gradient of the penalty: use several updates per batch.
    """
    ratio_T = token_ratio(inputs)
    picked_T = inputs.step_values["picked"]
    penalty_T = (inputs.logp_T - inputs.old_logp_T.detach()).abs()
    loss_T = -ratio_T * inputs.advantages_T + cov_kl_coef * picked_T * penalty_T
    metrics = {"policy/step_mask_frac": count(picked_T > 0), **common_metrics(inputs, ratio_T)}
    return LossOutputs(loss_T=weighted(loss_T, inputs), metrics=metrics)
