"""TensorFlow's Adam from PyTorch's: the same numbers from any Adam that reads the eps of its group.

    PyTorch:     Δ = lr · m̂ / (√v̂ + ε)          m̂ = m / (1 − β₁ᵗ), v̂ = v / (1 − β₂ᵗ)
    TensorFlow:  Δ = lr · m̂ / (√v̂ + ε / √(1 − β₂ᵗ))

TensorFlow adds ε to √v before the bias correction. At the first step with β₂ = 0.999 its ε is 32 times PyTorch's, so
parameters with small gradients move less early on, where PyTorch's Adam makes RLHF updates too aggressive ("The N
Implementation Details of RLHF with PPO", Hugging Face blog, 2023, "PyTorch Adam optimizer numerical issues"). Setting
the eps of the group before each step is exact for the single-tensor, foreach and fused kernels and for DeepSpeed's,
because all of them read eps at each step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch


class TFAdamW(torch.optim.AdamW):
    """AdamW that adds epsilon where TensorFlow does. The step number comes from its own state."""

    def __init__(self, groups: Sequence[dict[str, Any]], *, eps: float, **settings: Any) -> None:
        super().__init__([{**group, "tf_eps": eps} for group in groups], eps=eps, **settings)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        for group in self.param_groups:
            done = next((int(self.state[p]["step"]) for p in group["params"] if p in self.state), 0)
            group["eps"] = tf_epsilon(group["tf_eps"], group["betas"][1], done + 1)
        return super().step(closure)


def tf_epsilon(epsilon: float, beta2: float, step: int) -> float:
    """Return the eps with which PyTorch's Adam is TensorFlow's with `epsilon` at step t, counted from 1."""
    return epsilon / math.sqrt(1 - beta2**step)
