"""Settings that contradict how the run was launched."""

from __future__ import annotations

import pytest

from lockstep.trainer.config.launcher import launch_problems
from lockstep.trainer.config.schema import Config


@pytest.fixture(autouse=True)
def deepspeed(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    return monkeypatch


def test_zero_1_is_refused(deepspeed: pytest.MonkeyPatch) -> None:
    config = Config()
    assert list(launch_problems(config.optimizer)) == []
    deepspeed.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "1")
    (problem,) = launch_problems(config.optimizer)
    assert problem.startswith("launched with ZeRO-1")
    deepspeed.setenv("ACCELERATE_USE_DEEPSPEED", "false")
    assert list(launch_problems(config.optimizer)) == []


@pytest.mark.parametrize("name", ["sgd", "adamw_tf"])
def test_an_optimizer_that_offload_would_replace_is_refused(deepspeed: pytest.MonkeyPatch, name: str) -> None:
    config = Config()
    deepspeed.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "cpu")
    assert list(launch_problems(config.optimizer)) == []
    config.optimizer.name = name
    (problem,) = launch_problems(config.optimizer)
    assert f"optimizer.name={name} with offload_optimizer_device=cpu" in problem
    deepspeed.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "none")
    assert list(launch_problems(config.optimizer)) == []
