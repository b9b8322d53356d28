"""Credit of sampled tokens from a teacher: its expected gradient, and its metrics."""

from __future__ import annotations

import pytest
import torch

from lockstep.trainer.objective.distillation.sampled import teacher_advantages, teacher_metrics


def test_the_expected_gradient_is_that_of_the_reverse_kl():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(30, generator=generator, dtype=torch.float64).requires_grad_()
    teacher = torch.randn(30, generator=generator, dtype=torch.float64).log_softmax(-1)
    logp = logits.log_softmax(-1)
    kl = (logp.exp() * (logp - teacher)).sum()
    expected = torch.autograd.grad(kl, logits, retain_graph=True)[0]
    # REINFORCE with the advantage of every token, weighted by its probability.
    advantages = teacher_advantages(logp.detach(), teacher, coef=1.0)
    found = torch.autograd.grad(-(logp.exp().detach() * advantages * logp).sum(), logits)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_metrics_are_means_over_tokens():
    student, teacher = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    top = torch.tensor([[0.5, 0.25], [0.5, 0.0]]).log().nan_to_num(neginf=-1e4)
    found = teacher_metrics(student, teacher, top.double().exp().sum(1))
    assert found["teacher/kl"] == pytest.approx((0.5 - 1.0) / 2)
    assert found["teacher/kl_k3"] > 0
    assert found["teacher/logp"] == pytest.approx(-1.25)
    assert found["teacher/top_mass"] == pytest.approx((0.75 + 0.5) / 2)
    assert "teacher/top_mass" not in teacher_metrics(student, teacher, torch.zeros(len(student)))
    assert teacher_metrics(student[:0], teacher[:0], torch.zeros(0)) == {}
