"""Whitening against the array printed in the blog post."""

from __future__ import annotations

import pytest
import torch

from lockstep.trainer.objective.whitening import moments, standardize

REWARDS = torch.tensor([[1.2, 1.3, 1.4], [1.5, 1.6, 1.7], [1.8, 1.9, 2.0]], dtype=torch.float64)
WHITENED = torch.tensor(
    [[0.05080712, 0.4381051, 0.8254035], [1.2127019, 1.6000004, 1.9872988], [2.3745968, 2.7618952, 3.1491938]],
    dtype=torch.float64,
)
"""Printed by TensorFlow in "The N Implementation Details of RLHF with PPO" (Hugging Face blog, 2023), in float32."""


def whiten(x: torch.Tensor, mask: torch.Tensor | None = None, *, shift_mean: bool = True) -> torch.Tensor:
    whitened = standardize(x, moments(x, mask), shift_mean=shift_mean)
    return whitened if mask is None else whitened.masked_fill(~mask, 0.0)


def test_whitening_gives_the_published_array_with_the_population_variance():
    torch.testing.assert_close(whiten(REWARDS, shift_mean=False), WHITENED, rtol=0, atol=1e-5)
    assert moments(REWARDS).variance == pytest.approx(0.2 / 3)


def test_whitened_advantages_have_mean_zero_and_population_variance_one():
    x = whiten(torch.randn(50, dtype=torch.float64) * 7 + 3)
    assert float(x.mean()) == pytest.approx(0, abs=1e-12)
    assert float(x.var(unbiased=False)) == pytest.approx(1, abs=1e-8)


def test_masked_entries_have_no_effect_on_whitening():
    mask = torch.tensor([True, False, True, True, False])
    x = torch.tensor([1.0, torch.nan, 4.0, -2.0, 1e30])
    torch.testing.assert_close(whiten(x, mask)[mask], whiten(x[mask]))
    assert whiten(x, mask)[~mask].tolist() == [0.0, 0.0]


def test_equal_entries_become_zero_or_keep_their_mean_and_empty_input_stays_empty():
    x = torch.full((4,), 2.5)
    assert whiten(x).tolist() == [0.0] * 4
    assert whiten(x, shift_mean=False).tolist() == [2.5] * 4
    assert whiten(torch.zeros(0)).shape == (0,)
    assert not whiten(x, torch.zeros(4, dtype=torch.bool)).isnan().any()
