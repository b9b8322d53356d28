"""The entropy bonus as a component, with a fixed or adaptive weight (trainer/update/entropy_control.py)."""

from __future__ import annotations

from lockstep.trainer.update.components.component import Outputs, RolloutStep, Share, Term


def entropy_component(step: RolloutStep) -> Term:
    """Return the term of an optimizer step: `policy/entropy`, also without a bonus, and `policy/entropy_coef`."""

    def share(outputs: Outputs) -> Share:
        total = outputs.entropy_T.detach().sum()
        names = ("policy/entropy", "ppo/policy/entropy") if step.targets.credit else ("policy/entropy",)
        return Share(loss_T=outputs.entropy_T, sums=dict.fromkeys(names, total))

    is_adaptive = step.algorithm.entropy_target is not None
    constants = {"policy/entropy_coef": step.entropy_coef} if is_adaptive else {}
    return step.term("entropy", share, weight=-step.entropy_coef, more_metrics=lambda totals: constants)
