"""Apertus' activation in vLLM. With an engine: tests/integration/test_published_models.py (apertus)."""

from __future__ import annotations

import torch
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.activation import XIELU

from lockstep.rollout.engine.plugin import register


def test_parameters_have_the_dtype_of_the_model() -> None:
    register()
    register()
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        assert XIELU().alpha_p.dtype == torch.float32
        assert XIELU(dtype=torch.float16).alpha_n.dtype == torch.float16
