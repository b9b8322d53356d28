"""TensorFlow's Adam with PyTorch's: the same numbers from any Adam that reads its group's eps.

    PyTorch:     Δ = lr · m̂ / (√v̂ + ε)          m̂ = m / (1 − β₁ᵗ), v̂ = v / (1 − β₂ᵗ)
    TensorFlow:  Δ = lr · m̂ / (√v̂ + ε / √(1 − β₂ᵗ))

TensorFlow adds ε to √v before the bias correction. At the first step with β₂ = 0.999 its ε is 32 times PyTorch's, so
parameters with small gradients move less early on, where PyTorch's Adam makes RLHF updates too aggressive (seed 003,
"PyTorch Adam optimizer numerical issues"). Setting the group's eps before each step is exact, for the single-tensor,
foreach and fused kernels and for DeepSpeed's, because all of them read eps anew at each step.
"""

from __future__ import annotations

import math

import torch


def tf_epsilon(epsilon: float, beta2: float, step: int) -> float:
    """What PyTorch's Adam must use for eps at step t (counted from 1) to be TensorFlow's with `epsilon`.

    Raises ValueError for steps counted from 0.
    """
    if step < 1:
        raise ValueError(f"Adam's step is {step}, expected 1 for the first")
    return epsilon / math.sqrt(1 - beta2**step)


def set_tf_epsilon(optimizer: torch.optim.Optimizer, epsilon: float, step: int) -> None:
    """Call before `optimizer.step()` number `step` (from 1, and restored on resume)."""
    for group in optimizer.param_groups:
        group["eps"] = tf_epsilon(epsilon, group["betas"][1], step)
