"""The table of components: which ones a step has, and which ones train while the critic trains alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lockstep.trainer.update.components.component import TokenSet
from lockstep.trainer.update.components.table import ON_ROLLOUTS, rollout_terms
from tests.fixtures.loss_steps import loss_step, outputs_of
from tests.fixtures.models import VOCAB_SIZE
from tests.fixtures.teachers import made_up_scores

ALL = {
    "advantage": "gae",
    "kl_place": "loss",
    "kl_coef": 0.1,
    "entropy_coef": 0.02,
    "teacher_divergence": "forward",
    "teacher_divergence_coef": 0.7,
    "teacher_divergence_top_k": 4,
}


def every_component(update: int) -> tuple[TokenSet, dict[str, torch.Tensor]]:
    """Return the terms of an update with all components, and its gradients; update 0 trains the critic alone."""
    step = loss_step(has_critic=True, update=update, critic_warmup=1, **ALL)
    step = replace(step, batch=replace(step.batch, teacher=made_up_scores(step.batch, top_k=4, vocab_size=VOCAB_SIZE)))
    tokens = TokenSet(batch=step.batch, rows=step.rows, terms=rollout_terms(step))
    student_TF = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).log_softmax(1).requires_grad_()
    outputs = outputs_of(step.batch, others=(student_TF,))
    loss, sums = tokens.share(outputs)
    leaves = {"logp": outputs.logp_T, "entropy": outputs.entropy_T, "values": outputs.values_T, "student": student_TF}
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    gradients = {name: torch.zeros(1) if one is None else one for name, one in zip(leaves, found, strict=True)}
    return tokens, gradients | {"policy/loss": sums[tokens]["policy/loss"]}


def test_each_component_has_the_name_of_its_place_in_the_table() -> None:
    tokens, gradients = every_component(update=1)
    assert [term.name for term in tokens.terms] == [name for name in ON_ROLLOUTS if name != "router"], "a dense model"
    assert all(bool(gradients[name].any()) for name in ("logp", "entropy", "values", "student"))
    assert [term.name for term in rollout_terms(loss_step(has_reference=False))] == ["policy", "entropy"]


def test_while_the_critic_trains_alone_only_the_value_component_trains() -> None:
    tokens, gradients = every_component(update=0)
    assert {term.name for term in tokens.terms if term.weight} == {"value"}
    assert {name for name in ("logp", "entropy", "values", "student") if bool(gradients[name].any())} == {"values"}
    _, both = every_component(update=1)
    assert torch.equal(gradients["values"], both["values"])


@pytest.mark.parametrize("update", [0, 1])
def test_all_are_measured_also_while_the_critic_trains_alone(update: int) -> None:
    tokens, _ = every_component(update)
    step_outputs = outputs_of(tokens.batch, others=(torch.zeros(6, 5).log_softmax(1),))
    _, sums = tokens.share(step_outputs)
    reported = {name for of_one in sums.values() for name in of_one}
    assert {"policy/loss", "policy/approx_kl", "policy/entropy", "ppo/value/loss", "loss/teacher"} <= reported
