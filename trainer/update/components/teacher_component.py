"""The divergence from a teacher as a component, over the trained tokens of the rollouts, or of others.

    loss = w · Σ_t D(π_θ, π_teacher)_t / N        N: kept tokens of the component in the optimizer step, on all ranks

D compares the teacher's most probable tokens and all others together (trainer/objective/distillation/divergence.py).
The student's logprobs of them come from the fused head in the forward pass of the policy loss. The correction's mask
applies, its weights do not: D_t is a sum over the vocabulary, not over the sampled token.

Dimensions: _T trained tokens of a microbatch, _E most probable tokens of the teacher.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.rollout.errors import TrainingError
from lockstep.trainer.batch.packing import PackedBatch
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.objective.distillation.divergence import divergence
from lockstep.trainer.update.components.component import Outputs, RolloutStep, Share, Term, mean_over


def teacher_component(step: RolloutStep) -> Term:
    """Return the term of an optimizer step with a divergence."""
    algorithm, kind = step.algorithm, step.algorithm.teacher_divergence
    weight, beta = algorithm.teacher_divergence_coef, algorithm.teacher_divergence_beta
    return divergence_term("teacher", step.batch, kind=kind, beta=beta, weight=weight, num_tokens=step.num_tokens)


def divergence_term(name: str, batch: StepBatch, *, kind: str, beta: float, weight: float, num_tokens: int) -> Term:
    """Return the term of an optimizer step. Raises `TrainingError` if its rows have no scores of a teacher.

    `loss/<name>_rest` is the probability that the student gives to other tokens than the teacher's most probable ones.
    """
    if (scores := batch.teacher) is None:
        raise TrainingError(
            "the rows have no scores of a teacher, which a divergence needs; replay a dumped batch, which has them, or "
            "set algorithm.teacher_divergence=off demonstrations.teacher_divergence=off"
        )

    def arguments(packed: PackedBatch) -> Mapping[str, Any]:
        return {"candidate_ids_TE": scores.top_at(packed.token_index_T)[0].to(packed.ids.device)}

    def share(outputs: Outputs) -> Share:
        (student_TF,) = outputs.others
        teacher_TE = scores.top_at(outputs.index_T)[1].to(student_TF.device)
        loss_T = divergence(kind, student_TF, teacher_TE, beta=beta)
        rest = student_TF[:, -1].detach().exp().sum()
        return Share(loss_T=loss_T, sums={f"loss/{name}": loss_T.detach().sum(), f"loss/{name}_rest": rest})

    return Term(
        name=name,
        weight=weight,
        num_tokens=num_tokens,
        normalized=mean_over(num_tokens),
        share=share,
        arguments=arguments,
    )
