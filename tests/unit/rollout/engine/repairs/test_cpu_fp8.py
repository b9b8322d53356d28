"""Products of fp8 weights by the repaired kernel and by vLLM's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.model_executor.kernels.linear.scaled_mm.pytorch import ChannelWiseTorchFP8ScaledMMLinearKernel as Kernel

from lockstep.rollout.engine.repairs import cpu_fp8


@pytest.mark.parametrize(("has_bias", "padding"), [(False, 0), (True, 0), (True, 11)])
def test_products_are_those_of_vllm(has_bias: bool, padding: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kernel, "apply_scaled_mm", Kernel.apply_scaled_mm)  # restored afterwards
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
    kernel = object.__new__(Kernel)
    expected = kernel.apply_scaled_mm(**operands)
    before = Kernel.apply_scaled_mm
    for _ in range(2):
        cpu_fp8.install()
    assert Kernel.apply_scaled_mm is not before
    torch.testing.assert_close(kernel.apply_scaled_mm(**operands), expected)
