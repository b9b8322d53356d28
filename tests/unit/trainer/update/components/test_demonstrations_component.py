"""The cross-entropy of demonstrations as a component."""

from __future__ import annotations

import pytest
import torch

from lockstep.trainer.update.components.demonstrations_component import demonstrations_component
from tests.fixtures.loss_steps import computed, loss_batch, outputs_of


def test_its_loss_is_the_mean_cross_entropy_with_its_weight() -> None:
    outputs = outputs_of(loss_batch())
    term, share, metrics = computed(demonstrations_component("shown", weight=0.3, num_tokens=10), outputs)
    assert share.loss_T is not None
    loss = term.normalized(share.loss_T, outputs.rollout_T)
    torch.testing.assert_close(loss, -outputs.logp_T.sum() / 10)
    assert not term.in_policy_loss
    assert metrics == {
        "loss/shown": pytest.approx(float(loss.detach())),
        "loss/shown_entropy": pytest.approx(float(outputs.entropy_T.detach().sum()) / 10),
        "loss/shown_weight": 0.3,
        "loss/shown_tokens": 10.0,
    }
