"""The configured policy loss as a component."""

from __future__ import annotations

from lockstep.trainer.objective.losses.inputs import LossInputs
from lockstep.trainer.update.components.component import Outputs, RolloutStep, Share, Term

PPO_NAMES = {"ppo/policy/approxkl": "policy/approx_kl", "ppo/policy/clipfrac": "policy/clip_frac"}
"""Names of metrics in the PPO literature, reported with a critic."""


def policy_component(step: RolloutStep) -> Term:
    """Return the term of an optimizer step, with the values that the loss takes from the whole step; a collective."""
    targets = step.targets
    step_values = step.loss.step_values(
        step.scorer, step.batch, targets, step.rows, is_first=step.is_first, update=step.update
    )

    def share(outputs: Outputs) -> Share:
        logp_T, sampling_logp_T = outputs.logp_T, outputs.sampling_logp_T
        old_T = targets.old.at(outputs.index_T, logp_T)
        losses = step.loss.function(
            LossInputs(
                logp_T=logp_T,
                old_logp_T=old_T,
                advantages_T=outputs.at(targets.advantages_N),
                rollout_T=outputs.rollout_T,
                num_rollouts=len(step.tokens_S),
                weights_T=targets.correction.weights_at(outputs.index_T, old_T, sampling_logp_T),
                sampling_logp_T=sampling_logp_T.to(logp_T.dtype),
                step_values={name: outputs.at(values_N) for name, values_N in step_values.items()},
            )
        )
        sums = dict(losses.metrics)
        if targets.credit is not None:
            sums |= {name: sums[own] for name, own in PPO_NAMES.items() if own in sums}
            sums["ppo/policy/loss"] = losses.loss_T.detach().sum()
        return Share(loss_T=losses.loss_T, sums=sums)

    return step.term("policy", share, weight=1.0)
