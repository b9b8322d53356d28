"""Off-policy sequence masking (DeepSeek-AI 2025, "DeepSeek-V3.2", arXiv 2512.02556, section 3.1)."""

from typing import TYPE_CHECKING, Annotated

from lockstep.trainer.objective.declare import policy_loss
from lockstep.trainer.objective.losses.inputs import CLIP_HIGH, CLIP_LOW, LossInputs, LossOutputs, StepInputs
from lockstep.trainer.objective.losses.ppo_clip import masked_surrogate
from lockstep.trainer.objective.per_rollout import rollout_mean
from lockstep.trainer.setting import Setting

if TYPE_CHECKING:
    from torch import Tensor


def sequence_mask(inputs: StepInputs, *, off_policy_kl: float, **_: float) -> "dict[str, Tensor]":
    """Return 0 where A < 0 and the rollout's mean of log μ − log π_θ exceeds the bound, else 1."""
    kl_S = rollout_mean(inputs.sampling_logp_N - inputs.logp_N, inputs.rollout_N, inputs.num_rollouts)
    is_masked_N = (inputs.advantages_N < 0) & (kl_S > off_policy_kl)[inputs.rollout_N]
    return {"mask": (~is_masked_N).to(inputs.logp_N.dtype)}


@policy_loss(step_values=sequence_mask)
def opsm(
    inputs: LossInputs,
    *,
    clip_low: Annotated[float, CLIP_LOW],
    clip_high: Annotated[float, CLIP_HIGH],
    off_policy_kl: Annotated[
        float,
        Setting(
            default=0.1,
            description="opsm: mean of log mu - log pi above which a rollout of negative advantage is masked [nats]",
            above=0,
        ),
    ],
) -> LossOutputs:
    """l = −M min(r A, clip(r, 1 − clip_low, 1 + clip_high) A), r = π_θ / π_old; M = 0 where A < 0 and the mean of
    log μ − log π_θ over the rollout > off_policy_kl.

    Equation 9 of the report. A rollout that the policy would not sample any more teaches little by its failure, and
    pushes down tokens far from what the policy does. μ is the engine's policy, so the mean measures staleness and the
    mismatch of engine and trainer together. The report gives no bound.
    """
    return masked_surrogate(inputs, clip_low=clip_low, clip_high=clip_high)
