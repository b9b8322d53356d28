"""Components of the loss over the rollouts, by name.

Demonstrations train rows of their own beside them: `Demonstrations.token_set` (trainer/sft/demonstration_rows.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lockstep.rollout.on_demand import OnDemand
from lockstep.trainer.update.components.component import RolloutStep, Term

IS_PART: dict[str, Callable[[RolloutStep], bool]] = {
    "policy": lambda step: True,
    "kl": lambda step: step.targets.ref_logp_N is not None and step.algorithm.kl_place == "loss",
    "entropy": lambda step: True,
    "value": lambda step: step.targets.credit is not None,
    "router": lambda step: step.routers.exist,
    "teacher": lambda step: step.algorithm.teacher_divergence != "off",
}
"""Condition of each component: True if the step computes it. In the order in which their losses are added."""
ON_ROLLOUTS = OnDemand[Callable[[RolloutStep], Term]](
    str(__package__), {name: f"{name}_component:{name}_component" for name in IS_PART}
)


def rollout_terms(step: RolloutStep) -> list[Term]:
    """Return the terms of an optimizer step; a collective. While the critic trains alone, the others are measured."""
    terms = [ON_ROLLOUTS[name](step) for name, is_part in IS_PART.items() if is_part(step)]
    if step.trains_critic_alone:
        return [term if term.name == "value" else replace(term, weight=0.0) for term in terms]
    return terms
