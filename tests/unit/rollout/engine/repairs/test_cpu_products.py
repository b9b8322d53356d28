"""Products of quantized weights: choice of the kernel for int8, and values for fp8."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.model_executor.kernels.linear.scaled_mm import cpu
from vllm.model_executor.kernels.linear.scaled_mm.pytorch import ChannelWiseTorchFP8ScaledMMLinearKernel as Kernel

from lockstep.rollout.engine.repairs import cpu_products


@pytest.fixture(autouse=True)
def repaired() -> None:
    for _ in range(2):
        cpu_products.install()


@pytest.mark.parametrize(("dtype", "is_taken"), [(torch.float32, False), (torch.bfloat16, True)])
def test_float32_models_do_not_take_the_kernel_of_half_precision(
    dtype: torch.dtype, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = cpu
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # vLLM builds and loads a model under its dtype
    try:
        assert module.check_cpu_sgl_kernel(32, 64, torch.int8) is is_taken
    finally:
        torch.set_default_dtype(default)


@pytest.mark.parametrize(("has_bias", "padding"), [(False, 0), (True, 0), (True, 11)])
def test_products_of_fp8_are_those_of_vllm(has_bias: bool, padding: int) -> None:
    torch.manual_seed(0)
    operands: dict[str, Any] = {
        "A": torch.randn(6 + padding, 32).to(torch.float8_e4m3fn),
        "B": torch.randn(48, 32).to(torch.float8_e4m3fn).t(),
        "As": torch.rand(6 + padding, 1),
        "Bs": torch.rand(48, 1),
        "bias": torch.randn(48, dtype=torch.bfloat16) if has_bias else None,
        "out_dtype": torch.bfloat16,
        "output_shape": [2, 3, 48],
    }
    kernel, repaired = object.__new__(Kernel), vars(Kernel)["apply_scaled_mm"]
    torch.testing.assert_close(repaired(kernel, **operands), repaired.__wrapped__(kernel, **operands))
