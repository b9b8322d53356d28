"""The rollouts of one step, by the weights of this step: sampled, scored, and where the algorithm says so, refilled.

    prompts ─► sample ─► score ─► drop groups that say nothing ─► greedy answers (ReMax)
                 ▲                          │
                 └─ other prompts for them ◄┘   `dynamic_sampling`, at most `max_refills` times

Only rank 0 has an engine. It does all of this alone, and tells the others how far the data has been read, so ranks
cannot decide differently. Everything is a function of the seed, the step and the data cursor.
`trainer/collect/async_source.py` does the same while the trainer works.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from rewards.composition import RewardSet
from rollout.engine.protocol import Sampling
from rollout.records import Rollout
from rollout.sampler.sampler import OnRollout, Sampler
from rollout.system.background_loop import BackgroundLoop
from trainer.collect.groups import Collected, Group, is_kept
from trainer.config.schema import Config
from trainer.data.prompts import Prompts, Row
from trainer.distributed.distributed import Distributed
from trainer.stopwatch import Stopwatch


class RolloutSource(ABC):
    """Where a step gets its rollouts from."""

    def __init__(
        self,
        config: Config,
        *,
        distributed: Distributed,
        loop: BackgroundLoop,
        sampler: Sampler | None,
        sampling: Sampling,
        rewards: RewardSet,
        prompts: Prompts,
    ) -> None:
        """sampler: None on ranks without an engine."""
        self._config = config
        self._distributed = distributed
        self._loop = loop
        self._sampler = sampler
        self._sampling = sampling
        self._rewards = rewards
        self._prompts = prompts

    @abstractmethod
    def collect(
        self, step: int, version: int, watch: Stopwatch, on_rollout: OnRollout = lambda rollout: None
    ) -> Collected:
        """The rollouts of this step; a collective. Raises the error of rank 0 on all ranks.

        version: of the weights that the engine has, and that the rollouts are going to train.
        """

    @abstractmethod
    def forget(self) -> None:
        """After a failed `collect`, or between two: give up what is in flight; its prompts are sampled again."""

    @abstractmethod
    def close(self) -> None:
        """End what is still in flight."""

    def _forget_metrics(self) -> None:
        """What was counted about rollouts that nobody will see."""
        self._rewards.take_metrics()
        if self._sampler is not None:
            self._sampler.take_metrics()


class _Sampled(NamedTuple):
    row: Row
    group: Group


class Collector(RolloutSource):
    """Makes the rollouts of a step when they are asked for, so that all of them come from the weights of this step."""

    _before: tuple[int, dict[str, int]] | None = None
    """Cursor and resting rows at the beginning of a `collect` that has not come to its end."""

    def collect(
        self, step: int, version: int, watch: Stopwatch, on_rollout: OnRollout = lambda rollout: None
    ) -> Collected:
        sampler = self._sampler
        self._before = self._prompts.cursor, dict(self._prompts.resting)
        collected = self._distributed.together(
            lambda: Collected() if sampler is None else self._collect(sampler, step, watch, on_rollout)
        )
        self._before = None
        self._prompts.cursor = self._distributed.broadcast(self._prompts.cursor)
        return collected

    def forget(self) -> None:
        if self._before is not None:
            self._prompts.cursor, self._prompts.resting = self._before
            self._before = None
        self._forget_metrics()

    def close(self) -> None:
        """Nothing is in flight between two steps."""

    def _collect(self, sampler: Sampler, step: int, watch: Stopwatch, on_rollout: OnRollout) -> Collected:
        sampled = self._sample_groups(sampler, step, watch, on_rollout)
        kept = [one for one in sampled if is_kept(one.group, self._config)]
        dropped = [one.group for one in sampled if not is_kept(one.group, self._config)]
        greedy = []
        if self._config.needs_greedy:
            greedy = self._greedy_answers(sampler, [one.row for one in kept], step, watch)
        collected = Collected.of([one.group for one in kept], dropped, greedy, self._config)
        metrics = {**self._rewards.take_metrics(), **sampler.take_metrics(), **self._prompts.metrics()}
        return replace(collected, metrics={**metrics, **collected.metrics})

    def _sample_groups(self, sampler: Sampler, step: int, watch: Stopwatch, on_rollout: OnRollout) -> list[_Sampled]:
        """Groups until enough of them are kept, or the refills are used up. A group's id is its place in the list."""
        settings, algorithm = self._config.rollout, self._config.algorithm
        groups: list[_Sampled] = []
        for _ in range(1 + algorithm.max_refills if algorithm.dynamic_sampling else 1):
            missing = settings.prompts_per_step - sum(is_kept(one.group, self._config) for one in groups)
            if not missing:
                break
            rows = self._prompts.take(missing)
            with watch.stage("rollout"):
                sampled = self._loop.run(
                    sampler.collect(
                        rows,
                        samples_per_prompt=settings.samples_per_prompt,
                        sampling=self._sampling,
                        step=step,
                        first_group=len(groups),
                        on_rollout=on_rollout,
                    )
                )
            with watch.stage("reward"):
                scored = self._loop.run(self._rewards.score(sampled))
            by_group = groupby(scored, key=lambda rollout: rollout.group_id)
            new = [_Sampled(row, tuple(found)) for row, (_, found) in zip(rows, by_group, strict=True)]
            for one in new:
                self._prompts.learn(one.row, [rollout.reward for rollout in one.group if rollout.is_trainable])
            groups += new
        return groups

    def _greedy_answers(self, sampler: Sampler, rows: Sequence[Row], step: int, watch: Stopwatch) -> list[Rollout]:
        """One rollout per row at temperature 0, scored: ReMax's baseline. Never trained."""
        with watch.stage("rollout"):
            sampled = self._loop.run(
                sampler.collect(
                    rows, samples_per_prompt=1, sampling=replace(self._sampling, temperature=0.0), step=step
                )
            )
        with watch.stage("reward"):
            return self._loop.run(self._rewards.score(sampled, in_metrics=False))
