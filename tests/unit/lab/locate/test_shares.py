"""Divergence and its shares, on distributions that are written down."""

from __future__ import annotations

import pytest
import torch

from lockstep.lab.locate.shares import covariance, divergence, log_probabilities, share


def logits(seed: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(5, 11, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_divergence_is_that_of_kullback_and_leibler() -> None:
    p, q = log_probabilities(logits(0)), log_probabilities(logits(1))
    assert divergence(p, q) == pytest.approx((p.exp() * (p - q)).sum(-1).mean().item(), rel=1e-12)


def test_the_divergence_of_almost_equal_distributions_has_no_rounding() -> None:
    base, change = logits(0), logits(1, 1e-8)
    p = log_probabilities(base)
    expected = covariance(p.exp(), change, change) / 2
    assert divergence(p, log_probabilities(base + change)) == pytest.approx(expected, rel=1e-5)
    assert divergence(p, p) == 0.0


def test_a_constant_has_no_covariance() -> None:
    p = log_probabilities(logits(0)).exp()
    assert covariance(p, torch.full_like(p, 3.0), logits(1)) == pytest.approx(0.0, abs=1e-15)


def test_shares_of_small_errors_add_up_to_one_and_follow_their_size() -> None:
    base = logits(0)
    parts = [logits(1, 3e-4), logits(2, 1e-4), logits(3, 0.0)]
    engine, trainer = log_probabilities(base + sum(parts)), log_probabilities(base)
    shares = [share(engine, trainer, log_probabilities(base + part)) for part in parts]
    assert sum(shares) == pytest.approx(1.0, abs=1e-3)
    assert shares[0] > 0.8
    assert shares[2] == pytest.approx(0.0, abs=1e-12)


def test_errors_that_cancel_have_shares_of_both_signs() -> None:
    base, rest = logits(0), logits(1, 1e-5)
    error = 10 * rest
    engine, trainer = log_probabilities(base + rest), log_probabilities(base)
    shares = [share(engine, trainer, log_probabilities(base + one)) for one in (error, rest - error)]
    assert shares == [pytest.approx(10, rel=1e-2), pytest.approx(-9, rel=1e-2)]


def test_equal_sides_have_no_shares() -> None:
    p = log_probabilities(logits(0))
    assert share(p, p, log_probabilities(logits(1))) == 0.0
