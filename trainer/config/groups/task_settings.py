"""Settings of the task: `environment` and `reward`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lockstep.rewards.functions import ISOLATED, runs_in_worker
from lockstep.trainer.config.conditions import WORKERS
from lockstep.trainer.setting import setting


@dataclass
class EnvironmentConfig:
    name: str = setting("single_turn", "name of an environment, or path/to/file.py:ClassName")
    settings: dict[str, Any] = setting({}, "keyword arguments of the environment")
    max_turns: int | None = setting(
        None, "maximum number of assistant turns per episode; null: what the environment declares", low=1
    )
    call_timeout_s: float = setting(
        600.0,
        "limit of one reset, step, conclude or close, without the engine, tool calls and waits for a place [s]",
        above=0,
    )
    history: str = setting(
        "keep",
        "keep: past turns stay as sampled; template: as the chat template renders them (branches where it drops "
        "reasoning)",
        choices=("keep", "template"),
    )


@dataclass
class RewardConfig:
    functions: list[str] = setting(
        [],
        "reward functions: a built-in name, or path/to/file.py:function",
        example="reward=numeric (the last number against that of column `answer`), or 'reward.functions=[my.py:score]'",
    )
    weights: list[float] | None = setting(None, "weight per reward function, in the same order; null: 1 each")
    settings: dict[str, Any] = setting({}, "keyword arguments per reward function name")
    timeout_s: float = setting(30.0, "wall-clock limit of one reward call [s]", above=0)
    isolation: str = setting(
        "process",
        "where functions of files run; process: a worker that can be killed; thread: the trainer",
        choices=("process", "thread"),
    )
    workers: int = setting(4, "maximum number of reward worker processes", low=1, when=WORKERS)
    memory_gib: float = setting(4.0, "private memory limit of a reward worker; 0: none [GiB]", low=0, when=WORKERS)
    on_error: dict[str, Any] = setting(
        {}, "by outcome (timeout, exception, ...): drop (the default), raise, or the reward to use instead"
    )
    max_error_rate: float = setting(0.5, "share of a step's reward calls that may fail, or the run ends", low=0, high=1)

    @property
    def weight_by_name(self) -> dict[str, float]:
        """Weights of the reward functions by the names under which rollouts keep their rewards."""
        names = [spec.rpartition(":")[2] for spec in self.functions]
        return dict(zip(names, self.weights or [1.0] * len(names), strict=True))

    @property
    def uses_workers(self) -> bool:
        """True if a reward function runs in a worker process."""
        return any(spec in ISOLATED or runs_in_worker(spec, self.isolation) for spec in self.functions)
