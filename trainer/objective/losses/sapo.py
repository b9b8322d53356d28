"""SAPO (Gao et al. 2025, "Soft Adaptive Policy Optimization", arXiv 2511.20347): a smooth gate instead of a clip."""

from typing import Annotated

from lockstep.trainer.objective.declare import policy_loss
from lockstep.trainer.objective.losses.inputs import LossInputs, LossOutputs, common_metrics, token_ratio, weighted
from lockstep.trainer.setting import Setting


@policy_loss()
def sapo(
    inputs: LossInputs,
    *,
    tau_positive: Annotated[
        float, Setting(default=1.0, description="sapo: temperature of the gate for positive advantages", above=0)
    ],
    tau_negative: Annotated[
        float, Setting(default=1.05, description="sapo: temperature of the gate for negative advantages", above=0)
    ],
) -> LossOutputs:
    """l = −(4/τ) σ(τ (r − 1)) A, τ by the sign of A.

    At r = 1 the derivative of the gate with respect to r is 1, as for the unclipped surrogate; it decays on both sides,
    faster with larger τ. τ is larger for negative advantages, because they raise the logits of many unsampled tokens.
    """
    ratio_T = token_ratio(inputs)
    tau_T = ratio_T.detach().new_full(ratio_T.shape, tau_negative)
    tau_T = tau_T.masked_fill(inputs.advantages_T > 0, tau_positive)
    gate_T = (tau_T * (ratio_T - 1)).sigmoid() * 4 / tau_T
    slope_T = 4 * (tau_T * (ratio_T - 1)).sigmoid() * (-tau_T * (ratio_T - 1)).sigmoid()
    metrics = {"policy/gate_slope_mean": slope_T.detach().sum(), **common_metrics(inputs, ratio_T)}
    return LossOutputs(loss_T=weighted(-gate_T * inputs.advantages_T, inputs), metrics=metrics)
