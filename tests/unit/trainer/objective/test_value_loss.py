"""Clipped value loss by hand."""

from __future__ import annotations

import pytest
import torch

from lockstep.trainer.objective.value_loss import clipped_value_loss


def test_value_loss_is_half_the_larger_of_the_two_squared_errors():
    values, old = torch.tensor([1.0, 1.0, 0.1]), torch.tensor([0.0, 2.0, 0.0])
    returns = torch.tensor([2.0, 2.0, 5.0])
    loss, metrics = clipped_value_loss(values, old, returns, clip=0.2)
    # clipped values: 0.2, 1.8, 0.1
    torch.testing.assert_close(loss, 0.5 * torch.tensor([1.8**2, 1.0, 4.9**2]))
    assert metrics["ppo/value/clip_frac"] == 1


def test_a_value_that_has_moved_past_the_clip_gets_no_gradient():
    values = torch.tensor([1.0, 0.1], requires_grad=True)
    clipped_value_loss(values, torch.zeros(2), torch.tensor([3.0, 3.0]), clip=0.2).loss_T.sum().backward()
    assert values.grad is not None
    assert values.grad[0] == 0
    assert values.grad[1] == pytest.approx(0.1 - 3.0)


def test_without_a_clip_the_value_loss_is_half_the_squared_error():
    loss, _ = clipped_value_loss(torch.tensor([1.0]), torch.tensor([9.0]), torch.tensor([4.0]), clip=None)
    assert loss.item() == 4.5


def test_shapes_that_differ_are_refused():
    with pytest.raises(ValueError, match="one shape"):
        clipped_value_loss(torch.ones(2), torch.ones(1), torch.ones(2), clip=0.2)
