"""CISPO (MiniMax 2025, "MiniMax-M1"): clip the weight of the gradient instead of dropping the token."""

from typing import Annotated

from lockstep.trainer.objective.declare import policy_loss
from lockstep.trainer.objective.losses.inputs import (
    CLIP_HIGH,
    CLIP_LOW,
    LossInputs,
    LossOutputs,
    common_metrics,
    count,
    token_ratio,
    weighted,
)


@policy_loss()
def cispo(
    inputs: LossInputs, *, clip_low: Annotated[float | None, CLIP_LOW], clip_high: Annotated[float, CLIP_HIGH]
) -> LossOutputs:
    """l = −sg[clip(r, 1 − clip_low, 1 + clip_high)] A logp, r = π_θ / π_old per token.

    Every token keeps a gradient. Equations 4 and 5 of the paper, which has no lower bound (`None`) and tunes the upper
    one; ScaleRL (Khatri et al. 2025) found 1 + clip_high = 5 robust.
    """
    ratio_T = token_ratio(inputs).detach()
    low = 0.0 if clip_low is None else 1 - clip_low
    coef_T = ratio_T.clamp(low, 1 + clip_high)
    loss_T = -coef_T * inputs.advantages_T * inputs.logp_T
    metrics = {"policy/clip_frac": count(coef_T.ne(ratio_T)), **common_metrics(inputs, ratio_T)}
    return LossOutputs(loss_T=weighted(loss_T, inputs), metrics=metrics)
