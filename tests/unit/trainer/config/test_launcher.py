"""Settings that contradict how the run was launched."""

from __future__ import annotations

import pytest

from lockstep.trainer.config import launcher
from lockstep.trainer.config.launcher import launch_problems
from lockstep.trainer.config.schema import Config


@pytest.fixture(autouse=True)
def deepspeed(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    return monkeypatch


def test_zero_1_is_refused(deepspeed: pytest.MonkeyPatch) -> None:
    config = Config()
    assert list(launch_problems(config.optimizer, config.model)) == []
    deepspeed.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "1")
    (problem,) = launch_problems(config.optimizer, config.model)
    assert problem.startswith("launched with ZeRO-1")
    deepspeed.setenv("ACCELERATE_USE_DEEPSPEED", "false")
    assert list(launch_problems(config.optimizer, config.model)) == []


@pytest.mark.parametrize("name", ["sgd", "adamw_tf"])
def test_an_optimizer_that_offload_would_replace_is_refused(deepspeed: pytest.MonkeyPatch, name: str) -> None:
    config = Config()
    deepspeed.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "cpu")
    assert list(launch_problems(config.optimizer, config.model)) == []
    config.optimizer.name = name
    (problem,) = launch_problems(config.optimizer, config.model)
    assert f"optimizer.name={name} with offload_optimizer_device=cpu" in problem
    deepspeed.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "none")
    assert list(launch_problems(config.optimizer, config.model)) == []


@pytest.mark.parametrize(
    ("words", "processes"),
    [
        (["--num_processes", "2"], 2),
        (["--cpu", "--num-processes=4"], 4),
        (["--num_processes", "1"], None),
        (["train.py"], None),
        (["--num_processes"], None),
    ],
)
def test_a_launcher_that_started_fewer_processes_than_asked_is_refused(
    deepspeed: pytest.MonkeyPatch, words: list[str], processes: int | None
) -> None:
    deepspeed.delenv("WORLD_SIZE", raising=False)
    deepspeed.setattr(launcher, "_command_of_parent", lambda: ["python", "accelerate", "launch", *words])
    problems = list(launch_problems(Config().optimizer, Config().model))
    assert [f"was asked for {processes} processes and started one" in problem for problem in problems] == (
        [True] if processes else []
    )
    deepspeed.setenv("WORLD_SIZE", "4")
    assert list(launch_problems(Config().optimizer, Config().model)) == []
