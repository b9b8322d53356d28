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
from collections.abc import Sequence
from typing import Any

import torch


class TFAdamW(torch.optim.AdamW):
    """AdamW that adds epsilon where TensorFlow does. The step number comes from its own state."""

    def __init__(self, groups: Sequence[dict[str, Any]], *, eps: float, **settings: Any) -> None:
        super().__init__([{**group, "tf_eps": eps} for group in groups], eps=eps, **settings)
        # A hook and no method `step`: hooks of others would run around that one and again around PyTorch's.
        self.register_step_pre_hook(_set_epsilon)


def _set_epsilon(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for group in optimizer.param_groups:
        num_steps = next((int(optimizer.state[p]["step"]) for p in group["params"] if p in optimizer.state), 0)
        group["eps"] = tf_epsilon(group["tf_eps"], group["betas"][1], num_steps + 1)


def tf_epsilon(epsilon: float, beta2: float, step: int) -> float:
    """Return the eps with which PyTorch's Adam is TensorFlow's with `epsilon` at step t, counted from 1."""
    return epsilon / math.sqrt(1 - beta2**step)
