"""Whole steps of the trainer on prepared rollouts: `Trainer.step` without engine and sync."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lockstep.rollout.records import EngineCall, FinishReason, Rollout
from lockstep.rollout.weights.sync import SyncReport
from lockstep.trainer.collect.source import Collected
from lockstep.trainer.config.schema import Config
from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.observe.step_metrics import StepReport
from lockstep.trainer.step import Trainer
from lockstep.trainer.update.optimizers.optimizer import make_optimizer
from lockstep.trainer.update.updater import Updater


def make_rollouts(
    *,
    rows: int,
    median: float,
    sigma: float,
    vocab: int,
    longest: int,
    group: int = 4,
    prompt: int | None = None,
    turns: int = 1,
) -> list[Rollout]:
    """Make rollouts with log-normal lengths.

    prompt: tokens of the prompt that a group shares; None: half of each rollout is its own prompt. turns: calls of each
    rollout, which share its tokens; half of those of a later turn are a tool's answer.
    """
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(median), sigma, rows), 8, longest).astype(int)
    of_groups = [rng.integers(3, vocab, prompt or 0) for _ in range(-(-rows // group))]

    def one(index: int, length: int) -> Rollout:
        num_sampled = length if prompt else length - length // 2
        ids = tuple((of_groups[index // group] if prompt else rng.integers(3, vocab, length // 2)).tolist())
        calls = []
        for turn, share in enumerate(np.array_split(rng.integers(3, vocab, num_sampled), turns)):
            answer, sampled = np.split(share, [len(share) // 2 if turn else 0])
            call = EngineCall(
                prompt_ids=(*ids, *answer.tolist()),
                sampled_ids=tuple(sampled.tolist()),
                sampled_logprobs=(-float(np.log(vocab)),) * len(sampled),
                finish_reason=FinishReason.STOP,
            )
            calls.append(call)
            ids = call.all_ids
        return Rollout(rollout_id=index, group_id=index // group, calls=tuple(calls), reward=float(index % 2))

    return [one(index, int(length)) for index, length in enumerate(lengths)]


class Ready:
    """A source of prepared rollouts."""

    def __init__(self, rollouts: list[Rollout]) -> None:
        self._collected = Collected(rollouts=tuple(rollouts), trained=tuple(rollouts))

    def collect(self, step: int, version: int, watch: Any, on_rollout: Any) -> Collected:
        with watch.stage("rollout"):
            return self._collected


class NoEngine:
    """A weight sync that does nothing."""

    def sleep(self) -> None:
        """Do nothing."""

    def push(self, version: int) -> SyncReport:
        return SyncReport(version=version, gather_s=0, transfer_s=0, pause_s=0, bytes=0, canary_abs_diff=0)

    def take_changes(self) -> dict[str, float]:
        """Return no metrics: no server leaves or joins."""
        return {}


def trainer_step(policy: Policy, config: Config, rollouts: list[Rollout]) -> Callable[[], StepReport]:
    """Return a function that runs one training step of this policy on these rollouts."""
    distributed = Distributed.start(dtype=config.model.dtype, max_grad_norm=config.optimizer.max_grad_norm)
    module = distributed.prepare(policy, make_optimizer(policy, config.optimizer))
    trainer = Trainer(
        config,
        distributed=distributed,
        updater=Updater(module, distributed, config),
        rollouts=Ready(rollouts if distributed.is_main else []),  # type: ignore[arg-type]
        reference=None,
        sync=NoEngine(),  # type: ignore[arg-type]
    )
    return trainer.step
