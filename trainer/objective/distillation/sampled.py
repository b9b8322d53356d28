"""Credit of sampled tokens from a teacher, and how far the student is from it.

The reverse KL of a student from its teacher is the expectation of log π_student − log π_teacher over the student's own
tokens. Its gradient at each visited position is that of REINFORCE with the advantage

    A_t = c (log π_teacher,t − log π_old,t)

per token, without a baseline: a dense reward that needs no group. Effects of a token on later positions are left out
(discount 0), as in "On-Policy Distillation" (Thinking Machines Lab, blog, 2025).

Dimensions: _N trained tokens of the step, _E most probable tokens of the teacher.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.trainer.objective.kl import k3

if TYPE_CHECKING:
    from torch import Tensor


def teacher_advantages(old_N: Tensor, teacher_N: Tensor, *, coef: float) -> Tensor:
    """Return (N,) advantages of the module docstring. coef: c."""
    return coef * (teacher_N - old_N)


def teacher_metrics(student_N: Tensor, teacher_N: Tensor, mass_N: Tensor) -> dict[str, float]:
    """Return the distance of the student from the teacher before the update; empty without tokens.

    mass_N: probability of the teacher's most probable tokens together; 0 if it names none.

    Means over the trained tokens, with d = log π_student − log π_teacher of the sampled token:

    * `teacher/kl`: d, which estimates KL(π_student ‖ π_teacher).
    * `teacher/kl_k3`: exp(−d) + d − 1, another estimate of it, which is never negative.
    * `teacher/logp`: log π_teacher.
    * `teacher/top_mass`: probability of the teacher's most probable tokens together; only if it names them.
    """
    if not len(student_N):
        return {}
    diff_N = (student_N - teacher_N).double()
    metrics = {
        "teacher/kl": float(diff_N.mean()),
        "teacher/kl_k3": float(k3(-diff_N).mean()),
        "teacher/logp": float(teacher_N.double().mean()),
    }
    if mass_N.any():
        metrics["teacher/top_mass"] = float(mass_N.mean())
    return metrics


def teacher_floor(first_N: Tensor, again_N: Tensor) -> dict[str, float]:
    """Return the mismatch of a teacher with itself: its logprobs of the same tokens in two batches.

    Means with d = first − again: `teacher/noise_floor_kl`: d, and `teacher/noise_floor_k3`: exp(−d) + d − 1. Values of
    `teacher/kl` and `teacher/kl_k3` below them carry no information. Empty without tokens.
    """
    if not len(first_N):
        return {}
    diff_N = first_N.double() - again_N.double()
    return {"teacher/noise_floor_kl": float(diff_N.mean()), "teacher/noise_floor_k3": float(k3(-diff_N).mean())}
