"""Choice of the kernel for int8 weights, on a CPU that says it has AMX."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.model_executor.kernels.linear.scaled_mm import cpu

from lockstep.rollout.engine.repairs import cpu_int8


@pytest.mark.parametrize(("dtype", "is_taken"), [(torch.float32, False), (torch.bfloat16, True)])
def test_float32_models_do_not_take_the_kernel_of_half_precision(
    dtype: torch.dtype, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = cpu
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    for _ in range(2):
        cpu_int8.install()
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # vLLM builds and loads a model under its dtype
    try:
        assert module.check_cpu_sgl_kernel(32, 64, torch.int8) is is_taken
    finally:
        torch.set_default_dtype(default)
