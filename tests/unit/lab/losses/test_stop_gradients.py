"""Finite differences with stop-gradients held fixed."""

from __future__ import annotations

import pytest
import torch

from lockstep.lab.losses.stop_gradients import finite_differences

AT = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)


def test_a_detached_factor_is_a_constant() -> None:
    found = finite_differences(lambda x: (x.exp().detach() * x).sum(), AT)
    torch.testing.assert_close(found, AT.exp(), rtol=1e-8, atol=0)


def test_a_block_without_gradients_is_a_constant() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            factor = x.exp() + 1
        return (factor * x).sum()

    torch.testing.assert_close(finite_differences(function, AT), AT.exp() + 1, rtol=1e-8, atol=0)


def test_a_number_read_from_a_tensor_is_a_constant() -> None:
    found = finite_differences(lambda x: (x.exp().sum().item() * x).sum(), AT)
    torch.testing.assert_close(found, AT.exp().sum().expand(3), rtol=1e-8, atol=0)


def test_what_is_not_detached_is_differentiated() -> None:
    torch.testing.assert_close(finite_differences(lambda x: x.square().sum(), AT), 2 * AT, rtol=1e-8, atol=0)


def test_other_constants_near_the_point_are_an_error() -> None:
    seen: list[int] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        for _ in seen:
            x = x + x.detach()
        return x.sum()

    with pytest.raises(RuntimeError, match="detaches other values"):
        finite_differences(function, AT)
