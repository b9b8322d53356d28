"""Routed experts on a CPU: vLLM's checks of a configuration, all but the one for Model Runner V2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from rollout.engine.repairs import cpu_routes
from tests.fixtures.families import save_family

SETTINGS: dict[str, Any] = {
    "enable_return_routed_experts": True,
    "skip_tokenizer_init": True,
    "max_model_len": 64,
    "enforce_eager": True,
}


def checked(path: Path, **settings: Any) -> bool:
    """Return True if vLLM makes a configuration with routed experts."""
    cpu_routes.install()
    return EngineArgs(model=str(path), **SETTINGS, **settings).create_engine_config().aux_output_config.enabled


def test_a_mixture_of_experts_is_accepted(tmp_path: Path) -> None:
    assert checked(save_family("olmoe", tmp_path))
    assert not current_platform.is_out_of_tree()


def test_what_vllm_cannot_return_routes_of_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="only supports MoE models"):
        checked(save_family("qwen3", tmp_path / "dense"))
    with pytest.raises(ValueError, match="requires prefix caching"):
        checked(save_family("olmoe", tmp_path / "sparse"), enable_prefix_caching=False)
    assert not current_platform.is_out_of_tree()
