"""Routed experts on a CPU: vLLM's checks of a configuration, and the experts of a step without a prefix cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.distributed.aux_output_connector.worker import PendingAuxOutput
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from lockstep.rollout.engine.repairs import cpu_routes
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
        checked(save_family("olmoe", tmp_path / "sparse"), enable_prefix_caching=False, enable_chunked_prefill=True)
    assert not current_platform.is_out_of_tree()


def test_without_a_prefix_cache_prompts_must_be_computed_as_a_whole(tmp_path: Path) -> None:
    cpu_routes.install()
    settings = {**SETTINGS, "enable_prefix_caching": False, "enable_chunked_prefill": False}
    config = EngineArgs(model=str(save_family("olmoe", tmp_path)), **settings).create_engine_config()
    assert config.aux_output_config.enabled
    assert not config.cache_config.enable_prefix_caching


def step(*requests: tuple[str, int, int, int]) -> PendingAuxOutput:
    """Make a step of requests: name, tokens before the step, tokens of the step, and sampled tokens."""
    bounds = np.cumsum([0, *(tokens for _, _, tokens, _ in requests)])
    made = PendingAuxOutput(
        connector=None,  # type: ignore[arg-type]
        request_ids=[name for name, *_ in requests],
        token_starts=np.array([before for _, before, *_ in requests]),
        query_start_loc=bounds,
        routed_experts_gpu=torch.arange(2 * int(bounds[-1]), dtype=torch.uint8).view(-1, 1, 2),
    )
    sampled = np.array([count for *_, count in requests])
    made.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
    return made


def test_a_step_returns_the_experts_that_are_not_returned_yet() -> None:
    """A new request, one that goes on, one that is computed again after preemption, and one that samples nothing."""
    made = step(("new", 0, 3, 1), ("going on", 7, 1, 1), ("preempted", 0, 5, 1), ("waiting", 0, 2, 0))
    found = cpu_routes.routes_of_step(made, {"new": 0, "going on": 7, "preempted": 4, "waiting": 0})
    assert {name: (output.token_start, output.rows[:, 0, 0].tolist()) for name, output in found.items()} == {
        "new": (0, [0, 2, 4]),
        "going on": (7, [6]),
        "preempted": (4, [16]),
    }


def test_experts_of_an_earlier_step_are_not_made_up() -> None:
    with pytest.raises(AssertionError, match="a token of an earlier step"):
        cpu_routes.routes_of_step(step(("split", 2, 2, 1)), {"split": 0})
