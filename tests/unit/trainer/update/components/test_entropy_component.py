"""The entropy bonus as a component."""

from __future__ import annotations

import pytest

from lockstep.trainer.update.components.entropy_component import entropy_component
from tests.fixtures.loss_steps import COUNT, computed, loss_step, outputs_of


def test_it_is_subtracted_and_its_mean_reported() -> None:
    step = loss_step(entropy_coef=0.2)
    outputs = outputs_of(step.batch)
    term, share, metrics = computed(entropy_component(step), outputs)
    assert (term.weight, term.num_tokens, term.in_policy_loss) == (-0.2, COUNT, True)
    assert share.loss_T is outputs.entropy_T
    assert metrics == {"policy/entropy": pytest.approx(float(outputs.entropy_T.detach().mean()))}


def test_with_a_critic_it_also_has_the_name_of_ppo_and_with_a_target_its_weight_is_reported() -> None:
    step = loss_step(has_critic=True, entropy_coef=0.2, entropy_target=1.0)
    term, _, metrics = computed(entropy_component(step), outputs_of(step.batch))
    assert metrics["ppo/policy/entropy"] == metrics["policy/entropy"]
    assert metrics["policy/entropy_coef"] == -term.weight == 0.2


def test_without_a_bonus_it_is_measured() -> None:
    step = loss_step()
    term, _, metrics = computed(entropy_component(step), outputs_of(step.batch))
    assert term.weight == 0
    assert metrics["policy/entropy"] > 0
