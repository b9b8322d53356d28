"""The value loss of the critic as a component."""

from __future__ import annotations

from lockstep.trainer.objective.value_loss import clipped_value_loss
from lockstep.trainer.update.components.component import Outputs, RolloutStep, Share, Term


def value_component(step: RolloutStep) -> Term:
    """Return the term of an optimizer step, which has a critic."""
    algorithm, credit, returns_N = step.algorithm, step.targets.credit, step.targets.returns_N
    assert credit is not None
    assert returns_N is not None

    def share(outputs: Outputs) -> Share:
        old_values_T, returns_T = outputs.at(credit.values_N), outputs.at(returns_N)
        losses = clipped_value_loss(outputs.values_T, old_values_T, returns_T, clip=algorithm.value_clip)
        return Share(loss_T=losses.loss_T, sums=losses.metrics)

    return step.term("value", share, weight=algorithm.value_coef)
