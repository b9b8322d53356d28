"""Products of fp8 weights on a CPU: oneDNN's, but where the CPU has no instructions for fp8, 100 times slower.

vLLM 0.32 calls `torch._scaled_mm`, which falls back to a reference loop on most CPUs, and a batch of prompts takes
minutes. Every fp8 value is a float32 value and so is the product of two, so a float32 product is the same.
"""

from __future__ import annotations

import math

import torch

_REPAIRED = "_multiplies_in_float32"


def install() -> None:
    """Multiply fp8 values in float32, with scales by row and by channel; may be called repeatedly."""
    from vllm.model_executor.kernels.linear.scaled_mm.pytorch import ChannelWiseTorchFP8ScaledMMLinearKernel as Kernel

    if _REPAIRED in Kernel.apply_scaled_mm.__dict__:
        return

    def apply_scaled_mm(
        self: Kernel,
        *,
        A: torch.Tensor,
        B: torch.Tensor,
        out_dtype: torch.dtype,
        As: torch.Tensor,
        Bs: torch.Tensor,
        bias: torch.Tensor | None,
        output_shape: list[int],
    ) -> torch.Tensor:
        tokens = math.prod(output_shape[:-1])  # vLLM pads the rows of short batches
        output = A[:tokens].float() @ B.float() * As[:tokens] * Bs.t()
        return (output if bias is None else output + bias).to(out_dtype).view(*output_shape)

    apply_scaled_mm.__dict__[_REPAIRED] = True
    Kernel.apply_scaled_mm = apply_scaled_mm
