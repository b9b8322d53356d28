"""Requirements of an embedded engine. The engine itself: tests/integration/test_engine.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from vllm.config import ModelConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from rollout.engine.embedded import _check_compiler, device_arguments
from rollout.errors import ConfigError
from tests.fixtures.models import save_tiny_model


def test_settings_for_cpus_alone_are_not_given_to_gpus() -> None:
    on_cpu = device_arguments(is_cpu=True, dtype="bfloat16", max_model_len=9000)
    assert on_cpu == {"max_num_batched_tokens": 9000, "enable_chunked_prefill": False}
    on_gpu = device_arguments(is_cpu=False, dtype="bfloat16", max_model_len=9000)
    assert on_gpu == {"max_num_batched_tokens": 8192, "hf_overrides": {"head_dtype": "float32"}}
    assert "hf_overrides" not in device_arguments(is_cpu=False, dtype="float32", max_model_len=9000)
    assert {*on_cpu, *on_gpu} <= {field.name for field in dataclasses.fields(AsyncEngineArgs)}


def test_a_float32_head_is_what_vllm_reads_from_the_setting(tmp_path: Path) -> None:
    overrides = device_arguments(is_cpu=False, dtype="bfloat16", max_model_len=None)["hf_overrides"]
    save_tiny_model(tmp_path, tied=True)
    config = ModelConfig(str(tmp_path), dtype="bfloat16", skip_tokenizer_init=True, hf_overrides=overrides)
    assert config.head_dtype == torch.float32
    assert ModelConfig(str(tmp_path), dtype="bfloat16", skip_tokenizer_init=True).head_dtype == torch.bfloat16


def test_a_compiled_engine_needs_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("CXX", raising=False)
    (tmp_path / "clang++").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    _check_compiler()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=r"g\+\+ and clang\+\+ cannot be found.*set rollout\.compile_engine=false"):
        _check_compiler()
    monkeypatch.setenv("CXX", "icpx")
    with pytest.raises(ConfigError, match="icpx cannot be found"):
        _check_compiler()
