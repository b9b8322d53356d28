"""DPPO (Qi et al. 2026, "Rethinking the Trust Region in LLM Reinforcement Learning", arXiv 2602.04879)."""

from typing import TYPE_CHECKING, Annotated

from lockstep.trainer.objective.declare import policy_loss
from lockstep.trainer.objective.losses.inputs import LossInputs, LossOutputs, common_metrics, count, sampling_ratio
from lockstep.trainer.setting import Setting

if TYPE_CHECKING:
    from torch import Tensor

DIVERGENCE = Setting(
    default="tv", description="dppo: divergence of the trust region, of the sampled token", choices=("tv", "kl")
)
DIVERGENCE_BOUND = Setting(default=0.2, description="dppo: bound of the divergence; 0.05 for kl [nats]", above=0)
RATIO_CAP = Setting(default=20.0, description="dppo: upper bound of the ratio", low=1, may_be_infinite=True)

SMALLEST_REST = 1e-8
"""Smallest probability of all other tokens: their logprob is bounded where the token has probability 1."""


def binary_divergence(kind: str, logp_T: "Tensor", sampling_logp_T: "Tensor") -> "Tensor":
    """Return float64 TV or KL(μ ‖ π) [nats] between the distributions {token, all others}."""
    logp_T, sampling_logp_T = logp_T.double(), sampling_logp_T.double()
    prob_T = sampling_logp_T.exp()
    if kind == "tv":
        return (logp_T.exp() - prob_T).abs()
    rest_T, sampling_rest_T = ((-x_T.expm1()).clamp(min=SMALLEST_REST) for x_T in (logp_T, sampling_logp_T))
    return prob_T * (sampling_logp_T - logp_T) + (1 - prob_T) * (sampling_rest_T / rest_T).log()


@policy_loss(weighs_by_sampling=True)
def dppo(
    inputs: LossInputs,
    *,
    divergence: Annotated[str, DIVERGENCE],
    divergence_bound: Annotated[float, DIVERGENCE_BOUND],
    ratio_cap: Annotated[float, RATIO_CAP],
) -> LossOutputs:
    """l = −M sg[min(r, ratio_cap)] A logp, r = π_θ / μ per token; M = 0 where D(μ, π_θ) > divergence_bound and A pushes
    π_θ further away from μ (A > 0 and r > 1, or A < 0 and r < 1).

    D is the divergence between Bernoulli distributions of the sampled token, the paper's binary approximation:
    |π_θ − μ| for `tv`, KL(μ ‖ π_θ) for `kl`. A ratio bound is reached at once by a rare token, and never by a frequent
    one; a divergence bound treats both by the probability that moves. The trust region lies around μ, the policy of the
    engine.
    """
    ratio_T = sampling_ratio(inputs).detach()
    assert inputs.sampling_logp_T is not None
    divergence_T = binary_divergence(divergence, inputs.logp_T.detach(), inputs.sampling_logp_T.detach())
    leaves_T = (inputs.advantages_T > 0) & (ratio_T > 1) | (inputs.advantages_T < 0) & (ratio_T < 1)
    masked_T = leaves_T & (divergence_T > divergence_bound)
    coef_T = ratio_T.clamp(max=ratio_cap) * ~masked_T
    metrics = {"policy/clip_frac": count(masked_T), **common_metrics(inputs, ratio_T)}
    return LossOutputs(loss_T=-coef_T * inputs.advantages_T * inputs.logp_T, metrics=metrics)
