"""Components of the loss over the rollouts, by name.

Demonstrations train rows of their own beside them: `Demonstrations.token_set` (trainer/sft/demonstration_rows.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lockstep.trainer.update.components.component import RolloutStep, Term
from lockstep.trainer.update.components.entropy_component import entropy_component
from lockstep.trainer.update.components.kl_component import kl_component
from lockstep.trainer.update.components.policy_component import policy_component
from lockstep.trainer.update.components.router_component import router_component
from lockstep.trainer.update.components.teacher_component import teacher_component
from lockstep.trainer.update.components.value_component import value_component

ON_ROLLOUTS: dict[str, Callable[[RolloutStep], Term | None]] = {
    "policy": policy_component,
    "kl": kl_component,
    "entropy": entropy_component,
    "value": value_component,
    "router": router_component,
    "teacher": teacher_component,
}
"""In the order in which their losses are added."""


def rollout_terms(step: RolloutStep) -> list[Term]:
    """Return the terms of an optimizer step; a collective. While the critic trains alone, the others are measured."""
    terms = [term for component in ON_ROLLOUTS.values() if (term := component(step)) is not None]
    if step.trains_critic_alone:
        return [term if term.name == "value" else replace(term, weight=0.0) for term in terms]
    return terms
