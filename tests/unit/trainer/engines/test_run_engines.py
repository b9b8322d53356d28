"""Memory of a colocated engine, planned from the model's shape before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lockstep.rollout.errors import ConfigError
from lockstep.trainer.config.schema import Config
from lockstep.trainer.engines.run_engines import _memory, check_allocator
from lockstep.trainer.model.memory_plan import GIB, MemoryPlan, cache_gib, memory_plan
from lockstep.trainer.model.shape import planned_shape
from tests.fixtures.distributed import FakeRank
from tests.fixtures.models import save_tiny_model

RANK = FakeRank(world_size=2, zero_stage=3, device_memory=8 * GIB)


def colocated(cache_gib: float | None, path: Path) -> Config:
    config = Config()
    config.model.path, config.rollout.engine, config.rollout.kv_cache_gib = str(path), "colocated", cache_gib
    return config


def memory_of(config: Config) -> dict[str, float]:
    def plan_memory() -> MemoryPlan:
        return memory_plan(planned_shape(config.model, config.algorithm), config, RANK.sharding)

    return _memory(plan_memory, available=RANK.device_memory)


def test_on_a_gpu_the_cache_gets_the_remaining_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    path = save_tiny_model(tmp_path, tied=True)
    asked = memory_of(colocated(2.0, path))
    assert asked["kv_cache_gib"] == 2.0
    assert 2.5 / 8 < asked["gpu_memory_utilization"] < 2.7 / 8, "cache and workspace; the model is tiny"

    planned = memory_of(colocated(None, path))
    assert 2.0 < planned["kv_cache_gib"] < 0.9 * 8
    assert planned["gpu_memory_utilization"] > planned["kv_cache_gib"] / 8


def test_on_a_cpu_nothing_is_planned_and_the_cache_has_a_default(tmp_path: Path) -> None:
    assert memory_of(colocated(None, tmp_path)) == {}
    assert cache_gib(colocated(None, tmp_path).rollout) == 0.25
    assert cache_gib(colocated(2.0, tmp_path).rollout) == 2.0


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_memory_that_cannot_be_shared_with_an_engine_is_refused(name: str) -> None:
    check_allocator({name: "max_split_size_mb:128,expandable_segments:False"})
    with pytest.raises(ConfigError, match=f"unset {name}.*rollout=server"):
        check_allocator({name: "max_split_size_mb:128, expandable_segments:True"})
