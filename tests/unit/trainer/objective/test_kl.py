"""KL estimators by hand, and their exact expected value and gradient over a small vocabulary."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.trainer.objective.kl import KL_TERMS, k1, k2, k3, kl_term


def test_estimators_by_hand():
    x = torch.tensor([math.log(2), 0.0, -1.0], dtype=torch.float64)
    assert k1(x).tolist() == pytest.approx([-math.log(2), 0.0, 1.0])
    assert k2(x).tolist() == pytest.approx([math.log(2) ** 2 / 2, 0.0, 0.5])
    assert k3(x).tolist() == pytest.approx([1 - math.log(2), 0.0, math.exp(-1)])


@given(x=st.floats(-20, 20))
def test_k2_and_k3_are_never_negative(x):
    x = torch.tensor(x, dtype=torch.float64)
    assert float(k2(x)) >= 0
    assert float(k3(x)) >= 0


def test_k3_of_a_small_difference_is_not_rounding():
    assert float(k3(torch.tensor(1e-8, dtype=torch.float64))) == pytest.approx(5e-17, rel=1e-5)
    assert float(k3(torch.tensor(1e-3))) == pytest.approx(5e-7, rel=1e-3)


def test_terms_by_hand():
    logp_T, ref_T, old_T = torch.tensor([-1.0]), torch.tensor([-1.5]), torch.tensor([-1.2])
    k3_value = math.exp(-0.5) + 0.5 - 1
    expected = {"k1": 0.5, "k2": 0.125, "k3": k3_value, "unbiased": math.exp(0.2) * k3_value}
    for name in KL_TERMS:
        assert kl_term(name, logp_T, ref_T, old_T).item() == pytest.approx(expected[name], rel=1e-5), name


def expectation(name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return expected value and gradient of the term over tokens of the old policy, and those of the true KL."""
    generator = torch.Generator().manual_seed(0)
    logits, ref, old = (torch.randn(5, generator=generator, dtype=torch.float64) for _ in range(3))
    if name != "unbiased":
        old = logits  # the other terms have known values on policy only
    logits = logits.clone().requires_grad_()
    logp, ref_logp, old_logp = logits.log_softmax(0), ref.log_softmax(0), old.log_softmax(0)
    value = (old_logp.exp() * kl_term(name, logp, ref_logp, old_logp)).sum()
    truth = (logp.exp() * (logp - ref_logp)).sum()
    gradients = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (value, truth))
    return value, next(gradients), truth, next(gradients)


def test_unbiased_term_has_value_and_gradient_of_the_true_kl_off_policy():
    value, gradient, truth, true_gradient = expectation("unbiased")
    torch.testing.assert_close(value, truth, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient, true_gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_k1_and_k3_have_the_value_of_the_true_kl_on_policy(name):
    value, gradient, truth, true_gradient = expectation(name)
    torch.testing.assert_close(value, truth, rtol=0, atol=1e-12)
    assert (gradient - true_gradient).abs().max() > 0.01, "and not its gradient: the documentation says so"


def test_k2_has_the_gradient_of_the_true_kl_on_policy():
    _, gradient, _, true_gradient = expectation("k2")
    torch.testing.assert_close(gradient, true_gradient, rtol=0, atol=1e-12)


def test_only_the_policy_gets_a_gradient():
    logp_T, ref_T, old_T = (torch.tensor([x], requires_grad=True) for x in (-1.0, -1.5, -1.2))
    for name in KL_TERMS:
        kl_term(name, logp_T, ref_T, old_T).sum().backward()
    assert logp_T.grad is not None
    assert ref_T.grad is None
    assert old_T.grad is None


def test_a_policy_far_from_the_reference_gives_a_finite_term():
    for name in KL_TERMS:
        assert torch.isfinite(kl_term(name, torch.tensor([-500.0]), torch.tensor([-0.1]), torch.tensor([-0.1]))).all()
