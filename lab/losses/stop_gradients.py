"""Finite differences of a function with stop-gradients: what it detaches is held fixed.

A loss may differ from the function whose gradient it has, for example −sg[r] A log π (`cispo`). Its gradient is still
the derivative of its value if everything detached keeps the value that it has without the perturbation.

Covered: `detach`, `data`, `item`, `tolist` of tensors with gradient, and blocks under `torch.no_grad`.
Not covered: `detach_`, and numpy arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

STOPS = (Tensor.detach, Tensor.data.__get__, Tensor.item, Tensor.tolist, Tensor.__float__)  # type: ignore[attr-defined]


class StopGradients(TorchFunctionMode):
    """Record of what a function detaches (`known=None`), or its replay; the calls must have the same order."""

    def __init__(self, known: list[Any] | None = None) -> None:
        super().__init__()
        self.found: list[Any] = []
        self._known = known
        self._is_off = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch._C._set_grad_enabled:  # called by `torch.no_grad`
            self._is_off = not args[0]
            return result
        # Inside an autograd function gradients are off without `no_grad`; what it detaches is differentiated by hand.
        is_stop = func in STOPS and args[0].requires_grad and torch.is_grad_enabled()
        if not (self._is_off or is_stop):
            return result
        self.found.append(result)
        if self._known is None:
            return result
        if len(self.found) > len(self._known):
            raise RuntimeError("it detaches other values for nearly equal inputs")
        return self._known[len(self.found) - 1]


def finite_differences(function: Callable[[Tensor], Tensor], at: Tensor, *, width: float = 1e-6) -> Tensor:
    """Return the (T,) central differences of a scalar function of a (T,) float64 tensor.

    Raises RuntimeError: it detaches other values near `at`.
    """
    with StopGradients() as base:
        function(at.clone().requires_grad_())

    def value(place: int, shift: float) -> float:
        point = at.clone()
        point[place] += shift
        with StopGradients(base.found):
            result = function(point.requires_grad_())
        return float(result.detach())

    slopes = [(value(place, width) - value(place, -width)) / (2 * width) for place in range(len(at))]
    return torch.tensor(slopes, dtype=at.dtype)
