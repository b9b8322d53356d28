"""Divergences of a policy from a teacher that names its K most probable tokens.

At each position teacher t and student q are compared as distributions over K + 1 outcomes: each of the teacher's K most
probable tokens, and any other token, with the probability that is left. All are probabilities over the whole
vocabulary; nothing is normalized again. The result is a divergence of distributions: at least 0, 0 only if they agree
on all outcomes, at most the divergence over the whole vocabulary, and equal to it at K = V - 1. A sum over the K tokens
alone is none of this, and K renormalized entries do not show how much probability the student puts elsewhere.

    forward    KL(t ‖ q) = Σ t (log t - log q)              the student covers all that the teacher does
    reverse    KL(q ‖ t) = Σ q (log q - log t)              the student avoids what the teacher does not do
    jsd        β KL(t ‖ m) + (1 - β) KL(q ‖ m),  m = β t + (1 - β) q

Source of the last: Agarwal et al., "On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes"
(GKD, arXiv:2306.13649), section 2, with the teacher as P. It is at most log 2 and vanishes as β goes to 0 or 1; divided
by β it goes to the forward KL as β goes to 0, and divided by 1 - β to the reverse KL as β goes to 1.

Dimensions: _T tokens, _E the teacher's tokens at a position, _F the same and last all others.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

DIVERGENCES = ("reverse", "forward", "jsd")
REST_FLOOR = 1e-6
"""Least probability of the teacher's last outcome. Its logprobs are float32, so what they leave of 1 is known to about
1e-7; below the floor a student would be punished by rounding."""


def divergence(kind: str, student_TF: Tensor, teacher_TE: Tensor, *, beta: float = 0.5) -> Tensor:
    """Return the (T,) divergence in nats, differentiable in the student's logprobs.

    Args:
        kind: one of `DIVERGENCES`.
        student_TF: log q of the teacher's tokens and of all others, as `fused_candidates` returns them.
        teacher_TE: log t of its tokens, finite.
        beta: weight of the teacher in m, in (0, 1); for jsd only.
    """
    teacher_TF = with_rest(teacher_TE.detach()).to(student_TF)
    if kind == "forward":
        return _kl(teacher_TF, student_TF)
    if kind == "reverse":
        return _kl(student_TF, teacher_TF)
    if kind != "jsd":
        raise ValueError(f"found divergence {kind!r}, expected one of {', '.join(DIVERGENCES)}")
    mixture_TF = (teacher_TF + math.log(beta)).logaddexp(student_TF + math.log1p(-beta))
    return beta * _kl(teacher_TF, mixture_TF) + (1 - beta) * _kl(student_TF, mixture_TF)


def with_rest(teacher_TE: Tensor) -> Tensor:
    """Return (T, F) float64 teacher logprobs; the last is log max(1 - Σ t, `REST_FLOOR`)."""
    wide_TE = teacher_TE.double()
    joined_TF = wide_TE.new_empty((len(wide_TE), wide_TE.shape[1] + 1))
    joined_TF[:, :-1] = wide_TE
    joined_TF[:, -1] = (1 - wide_TE.exp().sum(1)).clamp_min(REST_FLOOR).log()
    return joined_TF


def _kl(p_TF: Tensor, other_TF: Tensor) -> Tensor:
    """Return KL(p ‖ other) of log-probabilities."""
    return (p_TF.exp() * (p_TF - other_TF)).sum(1)
