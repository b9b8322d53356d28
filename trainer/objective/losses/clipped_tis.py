"""REINFORCE with a clipped importance ratio ("Reinforcement Learning Loss Normalization", note)."""

from typing import Annotated

from lockstep.trainer.objective.declare import policy_loss
from lockstep.trainer.objective.losses.inputs import (
    CLIP_HIGH,
    LossInputs,
    LossOutputs,
    common_metrics,
    count,
    plain_log_ratio,
    sequence_ratio,
    token_ratio,
    weighted,
)
from lockstep.trainer.setting import Setting

LEVEL = Setting(
    default="token", description="clipped_tis: one ratio per token or per rollout", choices=("token", "sequence")
)


@policy_loss(
    sequence_log_ratio=plain_log_ratio,
    has_sequence_ratio=lambda *, importance_sampling_level, **_: importance_sampling_level == "sequence",
)
def clipped_tis(
    inputs: LossInputs, *, clip_high: Annotated[float, CLIP_HIGH], importance_sampling_level: Annotated[str, LEVEL]
) -> LossOutputs:
    """l = −sg[min(r, 1 + clip_high)] A logp; with the correction weight ρ, the gradient is −min(r, 1 + ε) ρ A ∇logp.

    Level `token`: r = π_θ / π_old. Level `sequence`: r is the geometric mean ratio of the rollout (the source says
    "averaged over the sequence"; the code it describes averages the log ratio).
    """
    ratio_T = (
        token_ratio(inputs)
        if importance_sampling_level == "token"
        else sequence_ratio(inputs, inputs.logp_T - inputs.old_logp_T)
    ).detach()
    loss_T = -ratio_T.clamp(max=1 + clip_high) * inputs.advantages_T * inputs.logp_T
    metrics = {"policy/clip_frac": count(ratio_T > 1 + clip_high), **common_metrics(inputs, ratio_T)}
    return LossOutputs(loss_T=weighted(loss_T, inputs), metrics=metrics)
