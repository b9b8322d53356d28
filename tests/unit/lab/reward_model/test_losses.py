"""Loss over comparisons."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lockstep.lab.reward_model.losses import ComparisonLoss, best_of_n_loss


def loss_of(
    scores: Tensor, best: list[int], present: Tensor | None = None, *, margin: Tensor | None = None
) -> ComparisonLoss:
    present = torch.ones_like(scores, dtype=torch.bool) if present is None else present
    return best_of_n_loss(scores, torch.tensor(best), present, torch.zeros(len(best)) if margin is None else margin)


def test_best_of_four_is_the_cross_entropy_over_four_scalars():
    scores = torch.tensor([[1.0, 2.0, 0.0, -1.0], [0.0, 0.0, 0.0, 0.0]])
    loss, metrics = loss_of(scores, [1, 3])
    expected = -torch.log_softmax(scores, 1)[[0, 1], [1, 3]]
    torch.testing.assert_close(loss, expected)
    assert metrics["accuracy"] == 1  # a tie is not a win
    assert metrics["margin"] == 1.0


def test_pairs_are_bradley_terry_with_a_margin():
    chosen, rejected, margin = torch.tensor([1.0, 0.5]), torch.tensor([0.2, 2.0]), torch.tensor([0.0, 0.7])
    loss, metrics = loss_of(torch.stack([chosen, rejected], 1), [0, 0], margin=margin)
    torch.testing.assert_close(loss, -torch.nn.functional.logsigmoid(chosen - rejected - margin))
    assert metrics["accuracy"] == 1


def test_absent_responses_do_not_affect_the_loss():
    scores = torch.tensor([[1.0, 2.0, 50.0]], requires_grad=True)
    present = torch.tensor([[True, True, False]])
    loss, metrics = loss_of(scores, [0], present)
    torch.testing.assert_close(loss, -torch.nn.functional.logsigmoid(torch.tensor([1.0]) - torch.tensor([2.0])))
    assert metrics["margin"] == -1
    loss.sum().backward()
    assert scores.grad is not None
    assert scores.grad[0, 2] == 0
    with pytest.raises(ValueError, match="does not have"):
        loss_of(scores, [2], present)
