"""The divergence from a teacher as a component of the loss, over the trained tokens of the rollouts, or of others.

    loss = w · Σ_t D(π_θ, π_teacher)_t / N        N: kept tokens of the component in the optimizer step, on all ranks

D compares the teacher's most probable tokens and all others together (trainer/objective/distillation/divergence.py).
The student's logprobs of them come from the fused head in the forward pass of the policy loss. The correction's mask
applies, its weights do not: D_t is a sum over the vocabulary, not over the sampled token.

Dimensions: _T trained tokens of a microbatch, _N those of the step, _E most probable tokens of the teacher.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.rollout.errors import TrainingError
from lockstep.trainer.batch.packing import PackedBatch
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.batch.teacher_scores import TeacherScores
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.objective.distillation.divergence import divergence
from lockstep.trainer.update.components import Outputs, RolloutStep, Share, component_metrics

NAME = "teacher"


class TeacherDivergence:
    """The configured divergence."""

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        self._algorithm = algorithm

    def term(self, step: RolloutStep) -> DivergenceTerm:
        """Return the term of an optimizer step. Raises `TrainingError` if its rows have no scores of a teacher."""
        is_chosen_S = torch.zeros(step.batch.num_rollouts, dtype=torch.bool)
        is_chosen_S[torch.from_numpy(step.rollouts)] = True
        keep_N = step.targets.keep_N
        return DivergenceTerm(
            name=NAME,
            kind=self._algorithm.teacher_divergence,
            beta=self._algorithm.teacher_divergence_beta,
            weight=self._algorithm.teacher_divergence_coef,
            keep_N=keep_N,
            scores=scores_of(step.batch),
            num_tokens=int((keep_N & is_chosen_S[step.batch.rollout_N]).sum()),
        )


def scores_of(batch: StepBatch) -> TeacherScores:
    """Return the teacher's scores of a batch. Raises `TrainingError` if it has none."""
    if batch.teacher is None:
        raise TrainingError(
            "the rows have no scores of a teacher, which a divergence needs; replay a dumped batch, which has them, or "
            "set algorithm.teacher_divergence=off demonstrations.teacher_divergence=off"
        )
    return batch.teacher


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DivergenceTerm:
    """The divergence of one optimizer step."""

    name: str
    kind: str
    beta: float
    weight: float
    keep_N: Tensor
    scores: TeacherScores
    num_tokens: int
    """N of the module docstring."""

    def arguments(self, packed: PackedBatch) -> Mapping[str, Any]:
        return {"candidate_ids_TE": self.scores.top_ids_NE[packed.token_index_T].to(packed.ids.device)}

    def share(self, outputs: Outputs) -> Share:
        index_T = outputs.packed.token_index_T
        (student_TF,) = outputs.others
        keep_T = self.keep_N[index_T]
        keep = keep_T.nonzero().squeeze(1).to(student_TF.device)  # indices: a mask's result would wait for the device
        divergence_T = divergence(
            self.kind,
            student_TF[keep],
            self.scores.top_logp_NE[index_T[keep_T]].to(student_TF.device),
            beta=self.beta,
        )
        total = divergence_T.sum()
        rest = student_TF[keep, -1].detach().exp().sum()
        loss = self.weight * total / max(self.num_tokens, 1)
        return Share(loss=loss, sums={f"loss/{self.name}": total.detach(), f"loss/{self.name}_rest": rest})

    def metrics(self, totals: Mapping[str, Tensor]) -> Mapping[str, float]:
        """Return means over the kept tokens: the divergence, and as `loss/<name>_rest` the probability that the student
        gives to other tokens than the teacher's most probable ones."""
        means = {name: float(total) / max(self.num_tokens, 1) for name, total in totals.items()}
        common = component_metrics(
            self.name, loss=means[f"loss/{self.name}"], weight=self.weight, num_tokens=self.num_tokens
        )
        return {**means, **common}
