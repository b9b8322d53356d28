"""The KL to the reference as a component, with `algorithm.kl_place=loss`."""

from __future__ import annotations

from lockstep.trainer.objective.kl import kl_term
from lockstep.trainer.update.components.component import Outputs, RolloutStep, Share, Term


def kl_component(step: RolloutStep) -> Term:
    """Return the term of an optimizer step, which has a reference."""
    algorithm, targets, ref_logp_N = step.algorithm, step.targets, step.targets.ref_logp_N
    assert ref_logp_N is not None

    def share(outputs: Outputs) -> Share:
        old_T = targets.old.at(outputs.index_T, outputs.logp_T)
        return Share(loss_T=kl_term(algorithm.kl_estimator, outputs.logp_T, outputs.at(ref_logp_N), old_T))

    return step.term("kl", share, weight=algorithm.kl_coef)
