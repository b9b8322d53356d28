"""Estimators of a KL divergence from sampled tokens, and the KL term of a loss.

For tokens sampled from p and a log ratio x = log q − log p at the sampled token, these estimate KL(p ‖ q):

    k1 = −x             unbiased, either sign, high variance
    k2 = ½ x²           biased, never negative
    k3 = eˣ − x − 1     unbiased, never negative

Source: J. Schulman, "Approximating KL divergence" (2020). In the loss, p is the policy and q the reference. An unbiased
value does not imply an unbiased gradient: on policy the gradient of k1 has mean 0, that of k2 is the gradient of
KL(p ‖ q), that of k3 the gradient of KL(q ‖ p). `unbiased` multiplies k3 by the importance ratio π_θ/π_old and
differentiates both, which gives value and gradient of KL(p ‖ q) for tokens sampled from π_old (DeepSeek-V3.2, 2025,
section on the unbiased KL estimate).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Log ratios are clamped to ± this before exp: exp(20) = 4.9e8 and its square are finite in float32 and bfloat16."""


def bounded(log_ratio_T: Tensor) -> Tensor:
    """Clamp log ratios for exp. Outside the bound their gradient is 0."""
    return log_ratio_T.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def k1(log_ratio_T: Tensor) -> Tensor:
    """Return −x."""
    return -log_ratio_T


def k2(log_ratio_T: Tensor) -> Tensor:
    """Return ½ x²."""
    return 0.5 * log_ratio_T.square()


def k3(log_ratio_T: Tensor) -> Tensor:
    """Return eˣ − x − 1."""
    return log_ratio_T.expm1() - log_ratio_T  # expm1: near 0 the terms cancel


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
KL_TERMS = (*KL_ESTIMATORS, "unbiased")
"""Names that `algorithm.kl_estimator` takes."""


def kl_term(name: str, logp_T: Tensor, ref_logp_T: Tensor, old_logp_T: Tensor) -> Tensor:
    """Return (T,) estimates of KL(policy ‖ reference) with a gradient for `logp_T` only.

    The gradient of k1, k2 and k3 is 0 where |logp_ref − logp| exceeds `LOG_RATIO_BOUND`.

    Args:
        name: one of `KL_TERMS`.
        old_logp_T: policy logprobs at the start of the update; only `unbiased` reads them.
    """
    log_ratio_T = bounded(ref_logp_T.detach() - logp_T)
    if name == "unbiased":
        return bounded(logp_T - old_logp_T.detach()).exp() * k3(log_ratio_T)
    return KL_ESTIMATORS[name](log_ratio_T)
