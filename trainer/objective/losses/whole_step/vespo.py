"""VESPO (Shen et al. 2026, "Variational Sequence-Level Soft Policy Optimization", arXiv 2602.10693)."""

import math
from typing import TYPE_CHECKING, Annotated

from lockstep.trainer.objective.declare import policy_loss
from lockstep.trainer.objective.kl import LOG_RATIO_BOUND, bounded
from lockstep.trainer.objective.losses.inputs import LossInputs, LossOutputs, StepInputs, common_metrics, sampling_ratio
from lockstep.trainer.objective.per_rollout import rollout_sum
from lockstep.trainer.setting import Setting

if TYPE_CHECKING:
    from torch import Tensor

SMALLEST_LOG_WEIGHT = math.log(1e-8)

K_POSITIVE = Setting(default=2.0, description="vespo: exponent of W for A >= 0; larger: less of W < 1", low=0)
K_NEGATIVE = Setting(default=3.0, description="vespo: exponent of W for A < 0", low=0)
DECAY_POSITIVE = Setting(default=3.0, description="vespo: decay in W for A >= 0; larger: less of W > 1", above=0)
DECAY_NEGATIVE = Setting(default=2.0, description="vespo: decay in W for A < 0", above=0)


def sequence_weights(
    inputs: StepInputs, *, k_positive: float, k_negative: float, decay_positive: float, decay_negative: float
) -> "dict[str, Tensor]":
    """Return φ(W) of the token's rollout: W^k exp(λ (1 − W)), with k and λ by the sign of the token's advantage."""
    log_ratio_N = bounded((inputs.logp_N - inputs.sampling_logp_N).double())
    log_w_S = rollout_sum(log_ratio_N, inputs.rollout_N, inputs.num_rollouts)
    log_w_N = log_w_S.clamp(SMALLEST_LOG_WEIGHT, LOG_RATIO_BOUND)[inputs.rollout_N]
    is_negative_N = (inputs.advantages_N < 0).double()
    k_N = k_positive + (k_negative - k_positive) * is_negative_N
    decay_N = decay_positive + (decay_negative - decay_positive) * is_negative_N
    weight_N = (k_N * log_w_N + decay_N * (1 - log_w_N.exp())).exp()
    return {"weight": weight_N.to(inputs.logp_N.dtype)}


@policy_loss(step_values=sequence_weights, weighs_by_sampling=True)
def vespo(
    inputs: LossInputs,
    *,
    k_positive: Annotated[float, K_POSITIVE],
    k_negative: Annotated[float, K_NEGATIVE],
    decay_positive: Annotated[float, DECAY_POSITIVE],
    decay_negative: Annotated[float, DECAY_NEGATIVE],
) -> LossOutputs:
    """l = −φ(W) A logp, φ(W) = W^k exp(λ (1 − W)), W = Π_t π_θ / μ of the rollout, not normalized by its length.

    φ(1) = 1; it is largest at W = k / λ and vanishes on both sides, so rollouts far from the policy lose their weight
    smoothly. k and λ (`decay`) differ by the sign of A. log W is clamped to [log 1e-8, 20].
    """
    weight_T = inputs.step_values["weight"]
    loss_T = -weight_T * inputs.advantages_T * inputs.logp_T
    metrics = {
        "policy/sequence_weight_mean": weight_T.sum(),
        **common_metrics(inputs, sampling_ratio(inputs).detach()),
    }
    return LossOutputs(loss_T=loss_T, metrics=metrics)
