"""Divergences over a teacher's tokens and the rest: bounds, limits and the floor of the rest."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from lockstep.trainer.objective.distillation.divergence import DIVERGENCES, REST_FLOOR, divergence, with_rest

T, V, K = 40, 12, 4


def distributions() -> tuple[torch.Tensor, torch.Tensor]:
    """Return (T, V) log q and log t."""
    generator = torch.Generator().manual_seed(0)
    q, t = torch.randn(2, T, V, generator=generator, dtype=torch.float64).mul(2).log_softmax(-1)
    return q, t


def restricted(q_TV: torch.Tensor, t_TV: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    top = t_TV.topk(k)
    others = q_TV.scatter(1, top.indices, -torch.inf).logsumexp(1, keepdim=True)
    return torch.cat([q_TV.gather(1, top.indices), others], 1), top.values


def whole(kind: str, q: torch.Tensor, t: torch.Tensor, beta: float) -> torch.Tensor:
    m = (beta * t.exp() + (1 - beta) * q.exp()).log()
    kl = lambda a, b: (a.exp() * (a - b)).sum(1)  # noqa: E731
    return {"forward": kl(t, q), "reverse": kl(q, t), "jsd": beta * kl(t, m) + (1 - beta) * kl(q, m)}[kind]


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_it_grows_with_k_up_to_the_divergence_over_the_vocabulary(kind):
    q, t = distributions()
    values = [divergence(kind, *restricted(q, t, k), beta=0.3) for k in range(1, V)]
    for lower, higher in itertools.pairwise(values):
        assert (lower >= 0).all()
        assert (higher >= lower - 1e-12).all()
    torch.testing.assert_close(values[-1], whole(kind, q, t, 0.3), rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_it_is_zero_with_zero_gradient_for_a_student_that_equals_its_teacher(kind):
    _, t = distributions()
    logits = t.clone().requires_grad_()
    student, teacher = restricted(logits.log_softmax(-1), t, K)
    found = divergence(kind, student, teacher.detach())
    torch.testing.assert_close(found, torch.zeros_like(found), rtol=0, atol=1e-12)
    found.sum().backward()
    torch.testing.assert_close(logits.grad, torch.zeros_like(logits), rtol=0, atol=1e-12)


def test_jsd_goes_to_the_two_kls_at_its_ends():
    student, teacher = restricted(*distributions(), K)
    near_0 = divergence("jsd", student, teacher, beta=1e-6) / 1e-6
    near_1 = divergence("jsd", student, teacher, beta=1 - 1e-6) / 1e-6
    torch.testing.assert_close(near_0, divergence("forward", student, teacher), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(near_1, divergence("reverse", student, teacher), rtol=1e-3, atol=1e-3)
    assert (divergence("jsd", student, teacher, beta=0.5) <= math.log(2)).all()


def test_a_teacher_with_nothing_left_gets_a_floor():
    teacher = torch.tensor([[0.25, 0.75 + 1e-6]], dtype=torch.float64).log()
    torch.testing.assert_close(with_rest(teacher)[0, -1].exp(), torch.tensor(REST_FLOOR, dtype=torch.float64))


def test_an_unknown_divergence_is_refused():
    with pytest.raises(ValueError, match="expected one of reverse, forward, jsd"):
        divergence("hellinger", *restricted(*distributions(), K))
