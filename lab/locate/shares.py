"""Shares of the final divergence: how much of it the errors of each operator make.

e_X = engine − trainer is the local error of operator X, on the engine's inputs. Added to the trainer's own forward pass
at X alone, it changes log p by δ_X; at all operators, by δ, which makes the trainer the engine. The divergence is half
the variance of δ under p to second order, and a variance of a sum divides into covariances:

    share_X = Cov_p(δ_X, δ) / Cov_p(δ, δ),        Σ_X share_X = 1 to second order

Shape legend: n sampled positions, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def log_probabilities(logits: Tensor) -> Tensor:
    """Return float64 log-probabilities, which add up to 1 as float32 ones do not."""
    return torch.log_softmax(logits.double(), -1)


def divergence(engine_nV: Tensor, trainer_nV: Tensor) -> float:
    """Return the mean KL(engine ‖ trainer) of normalized log-probabilities, in nats.

    Σ p (expm1(d) − d) with d = log q − log p has no difference of almost equal sums: it is exact down to 1e-30.
    """
    change = trainer_nV - engine_nV
    return (engine_nV.exp() * (torch.expm1(change) - change)).sum(-1).mean().item()


def covariance(weight_nV: Tensor, first_nV: Tensor, second_nV: Tensor) -> float:
    """Return the mean over positions of the covariance under the probabilities `weight_nV`."""
    mean_first, mean_second = ((weight_nV * one).sum(-1, keepdim=True) for one in (first_nV, second_nV))
    return (weight_nV * (first_nV - mean_first) * (second_nV - mean_second)).sum(-1).mean().item()


def share(engine_nV: Tensor, trainer_nV: Tensor, injected_nV: Tensor) -> float:
    """Return the share of the divergence that one operator's errors make.

    engine_nV, trainer_nV: log-probabilities of both sides. injected_nV: the trainer's, with the errors of the operator.
    """
    weight, whole = engine_nV.exp(), engine_nV - trainer_nV
    total = covariance(weight, whole, whole)
    return covariance(weight, injected_nV - trainer_nV, whole) / total if total > 0 else 0.0
