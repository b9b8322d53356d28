"""Products of int8 weights in a float32 model on a CPU with AMX.

vLLM 0.32 takes a kernel there that has half precision alone, and the first request kills the engine. Without it vLLM
uses oneDNN's, as on every other CPU.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

_REPAIRED = "_knows_float32"


def install() -> None:
    """Keep float32 models from the kernel, in models built later; may be called repeatedly."""
    from vllm.model_executor.kernels.linear.scaled_mm import cpu

    module: Any = cpu  # which has the function from another module
    check = module.check_cpu_sgl_kernel
    if _REPAIRED in check.__dict__:
        return

    @functools.wraps(check)
    def check_cpu_sgl_kernel(n: int, k: int, dtype: torch.dtype) -> bool:
        return torch.get_default_dtype() != torch.float32 and check(n, k, dtype)

    check_cpu_sgl_kernel.__dict__[_REPAIRED] = True
    module.check_cpu_sgl_kernel = check_cpu_sgl_kernel
