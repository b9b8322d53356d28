"""PPO's clipped surrogate per token, also with asymmetric bounds (DAPO's clip-higher) and dual clip."""

from typing import TYPE_CHECKING, Annotated

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
from lockstep.trainer.setting import Setting

if TYPE_CHECKING:
    from torch import Tensor


@policy_loss()
def ppo_clip(
    inputs: LossInputs,
    *,
    clip_low: Annotated[float, CLIP_LOW],
    clip_high: Annotated[float, CLIP_HIGH],
    dual_clip: Annotated[
        float | None,
        Setting(default=None, description="ppo_clip: cap of the loss for negative advantages [A]; null: off", above=1),
    ],
) -> LossOutputs:
    """l = −min(r A, clip(r, 1 − clip_low, 1 + clip_high) A), r = π_θ / π_old per token.

    With `dual_clip` = c > 1 (usually 3) and A < 0, l is at most −c A: a token with a very large ratio, which plain PPO
    would push down without bound, gets a constant loss.

    Sources: Schulman et al. 2017, equation 7; Yu et al. 2025 (DAPO), equation 10; Ye et al. 2020 (dual clip).
    """
    ratio_T = token_ratio(inputs)
    loss_T, metrics = clipped_surrogate(ratio_T, inputs.advantages_T, clip_low=clip_low, clip_high=clip_high)
    if dual_clip is not None:
        ceiling_T = -dual_clip * inputs.advantages_T
        is_capped_T = (inputs.advantages_T < 0) & (loss_T > ceiling_T)
        loss_T = ceiling_T.where(is_capped_T, loss_T)
        metrics["policy/dual_clip_frac"] = count(is_capped_T)
    return LossOutputs(loss_T=weighted(loss_T, inputs), metrics=metrics | common_metrics(inputs, ratio_T))


def clipped_surrogate(
    ratio_T: "Tensor", advantages_T: "Tensor", *, clip_low: float, clip_high: float
) -> "tuple[Tensor, dict[str, Tensor]]":
    """Return −min(r A, clip(r) A) and the numbers of tokens whose loss the bound determines."""
    clipped_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    is_low_T = (ratio_T < 1 - clip_low) & (advantages_T < 0)
    is_high_T = (ratio_T > 1 + clip_high) & (advantages_T > 0)
    metrics = {
        "policy/clip_frac": count(is_low_T | is_high_T),
        "policy/clip_low_frac": count(is_low_T),
        "policy/clip_high_frac": count(is_high_T),
    }
    return -(ratio_T * advantages_T).minimum(clipped_T * advantages_T), metrics


def masked_surrogate(inputs: LossInputs, *, clip_low: float, clip_high: float) -> LossOutputs:
    """Return the clipped surrogate times `mask` of the step's values, for losses that leave out tokens of a step."""
    ratio_T, mask_T = token_ratio(inputs), inputs.step_values["mask"]
    loss_T, metrics = clipped_surrogate(ratio_T, inputs.advantages_T, clip_low=clip_low, clip_high=clip_high)
    metrics |= {"policy/step_mask_frac": count(mask_T == 0), **common_metrics(inputs, ratio_T)}
    return LossOutputs(loss_T=weighted(loss_T * mask_T, inputs), metrics=metrics)
