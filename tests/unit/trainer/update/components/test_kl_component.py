"""The KL to the reference as a component."""

from __future__ import annotations

import pytest
import torch

from lockstep.trainer.update.components.kl_component import kl_component
from lockstep.trainer.update.components.table import IS_PART
from tests.fixtures.loss_steps import COUNT, computed, loss_step, outputs_of


@pytest.mark.parametrize("estimator", ["k3", "unbiased"])
def test_its_loss_is_the_estimate_of_each_token_and_its_weight_the_coefficient(estimator: str) -> None:
    step = loss_step(kl_coef=0.3, kl_estimator=estimator)
    outputs = outputs_of(step.batch)
    term, share, metrics = computed(kl_component(step), outputs)
    assert (term.weight, term.num_tokens, term.in_policy_loss, metrics) == (0.3, COUNT, True, {})
    assert step.targets.ref_logp_N is not None
    x_T = step.targets.ref_logp_N - outputs.logp_T
    ratio_T = (outputs.logp_T - step.targets.old.logp_N).exp() if estimator == "unbiased" else 1.0
    torch.testing.assert_close(share.loss_T, ratio_T * (x_T.exp() - x_T - 1), atol=1e-7, rtol=1e-4)


def test_there_is_none_without_a_reference_or_with_the_penalty_in_the_reward() -> None:
    assert IS_PART["kl"](loss_step(kl_coef=0.3))
    assert not IS_PART["kl"](loss_step(has_reference=False))
    assert not IS_PART["kl"](loss_step(kl_coef=0.3, kl_place="reward"))
