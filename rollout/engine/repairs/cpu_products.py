"""Products of quantized weights on a CPU.

int8 in a float32 model, with AMX: vLLM 0.32 takes a kernel that has half precision alone, and the first request kills
the engine. Without it vLLM uses oneDNN's, as on every other CPU.

fp8 by channel: vLLM calls `torch._scaled_mm`, a reference loop where the CPU has no instructions for fp8, 100 times
slower than float32; a batch of prompts takes minutes. Every fp8 value is a float32 value and so is the product of two,
so the product in float32 is the same.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

_REPAIRED = "_repaired_products"


def install() -> None:
    """Repair both, in models built later; may be called repeatedly."""
    from vllm.model_executor.kernels.linear.scaled_mm import cpu
    from vllm.model_executor.kernels.linear.scaled_mm.pytorch import ChannelWiseTorchFP8ScaledMMLinearKernel as Kernel

    module: Any = cpu  # which has the function from another module
    check = module.check_cpu_sgl_kernel
    if _REPAIRED in check.__dict__:
        return

    @functools.wraps(check)
    def check_cpu_sgl_kernel(n: int, k: int, dtype: torch.dtype) -> bool:
        return torch.get_default_dtype() != torch.float32 and check(n, k, dtype)

    @functools.wraps(Kernel.apply_scaled_mm)
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

    check_cpu_sgl_kernel.__dict__[_REPAIRED] = True
    module.check_cpu_sgl_kernel = check_cpu_sgl_kernel
    Kernel.apply_scaled_mm = apply_scaled_mm
