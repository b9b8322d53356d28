"""The value loss as a component."""

from __future__ import annotations

import pytest
import torch

from lockstep.trainer.update.components.table import IS_PART
from lockstep.trainer.update.components.value_component import value_component
from tests.fixtures.loss_steps import COUNT, computed, loss_step, outputs_of


def test_its_loss_compares_values_with_returns() -> None:
    step = loss_step(has_critic=True, value_coef=0.4, value_clip=None)
    outputs = outputs_of(step.batch)
    term, share, metrics = computed(value_component(step), outputs)
    assert (term.weight, term.num_tokens, term.in_policy_loss) == (0.4, COUNT, True)
    assert step.targets.returns_N is not None
    torch.testing.assert_close(share.loss_T, 0.5 * (outputs.values_T - step.targets.returns_N).square())
    assert metrics["ppo/value/vpred"] == pytest.approx(float(outputs.values_T.detach().mean()))


def test_the_clip_is_around_the_values_before_the_update() -> None:
    step = loss_step(has_critic=True, value_clip=0.1)
    _, share, metrics = computed(value_component(step), outputs_of(step.batch))
    assert share.loss_T is not None
    assert step.targets.credit is not None
    old_T, returns_T, values_T = step.targets.credit.values_N, step.targets.returns_N, outputs_of(step.batch).values_T
    assert returns_T is not None
    clipped_T = values_T.clamp(old_T - 0.1, old_T + 0.1)
    expected_T = 0.5 * torch.maximum((values_T - returns_T).square(), (clipped_T - returns_T).square())
    torch.testing.assert_close(share.loss_T, expected_T)
    assert metrics["ppo/value/clip_frac"] > 0


def test_there_is_none_without_a_critic() -> None:
    assert IS_PART["value"](loss_step(has_critic=True))
    assert not IS_PART["value"](loss_step())
