"""Estimators of a KL divergence from sampled tokens, and the KL term of a loss.

For tokens sampled from p and a log ratio x = log q − log p at the sampled token, these estimate KL(p ‖ q):

    k1 = −x             unbiased, either sign, high variance
    k2 = ½ x²           biased, never negative
    k3 = eˣ − x − 1     unbiased, never negative

Source: J. Schulman, "Approximating KL divergence" (2020). In the loss, p is the policy and q the reference. An
estimator with the right value need not have the right gradient: on policy that of k1 has mean 0, that of k2 is the
gradient of KL(p ‖ q), that of k3 the gradient of KL(q ‖ p). `unbiased` multiplies k3 by the importance ratio
π_θ/π_old and lets the gradient through both, which makes value and gradient those of KL(p ‖ q) for tokens sampled
from π_old (DeepSeek-V3.2, 2025, section on the unbiased KL estimate).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Log ratios are clamped to ± this before exp: exp(20) = 4.9e8 and its square are finite in float32 and bfloat16."""


def bounded(log_ratio_T: Tensor) -> Tensor:
    """The log ratio clamped for exp. Outside the bound its gradient is 0."""
    return log_ratio_T.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def k1(log_ratio_T: Tensor) -> Tensor:
    """−x: log p − log q. Either sign."""
    return -log_ratio_T


def k2(log_ratio_T: Tensor) -> Tensor:
    """½ x²."""
    return 0.5 * log_ratio_T.square()


def k3(log_ratio_T: Tensor) -> Tensor:
    """eˣ − x − 1, never negative; expm1, because near 0 the terms cancel."""
    return torch.expm1(log_ratio_T) - log_ratio_T


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
KL_TERMS = (*KL_ESTIMATORS, "unbiased")


def kl_term(name: str, logp_T: Tensor, ref_logp_T: Tensor, old_logp_T: Tensor) -> Tensor:
    """(T,) estimate per token of KL(policy ‖ reference), with gradient: what a loss adds, times its coefficient.

    Args:
        name: one of `KL_TERMS`.
        logp_T: policy logprobs with gradient. ref_logp_T: the reference's, detached here.
        old_logp_T: the policy's at the start of the update, detached here; only `unbiased` reads it.

    Raises ValueError for an unknown name.
    """
    log_ratio_T = bounded(ref_logp_T.detach() - logp_T)
    if name == "unbiased":
        return bounded(logp_T - old_logp_T.detach()).exp() * k3(log_ratio_T)
    if name not in KL_ESTIMATORS:
        raise ValueError(f"unknown KL term {name!r}; expected one of: {', '.join(KL_TERMS)}")
    return KL_ESTIMATORS[name](log_ratio_T)
