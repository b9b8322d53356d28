"""The KL to the reference as a component, with `algorithm.kl_place=loss`."""

from __future__ import annotations

from lockstep.trainer.objective.kl import kl_term
from lockstep.trainer.update.components.component import Outputs, RolloutStep, Share, Term


def kl_component(step: RolloutStep) -> Term | None:
    """Return the term of an optimizer step; None without a reference, or with the penalty in the reward."""
    algorithm, targets = step.algorithm, step.targets
    if (ref_logp_N := targets.ref_logp_N) is None or algorithm.kl_place != "loss":
        return None

    def share(outputs: Outputs) -> Share:
        old_T = targets.old.at(outputs.index_T, outputs.logp_T)
        return Share(loss_T=kl_term(algorithm.kl_estimator, outputs.logp_T, outputs.at(ref_logp_N), old_T))

    return step.term("kl", share, weight=algorithm.kl_coef)
