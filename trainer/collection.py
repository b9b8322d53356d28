"""The rollouts of one step: sampled, scored, and where the algorithm says so, shaped, filtered and refilled.

    prompts ─► sample ─► score ─► shape ─► drop groups that say nothing ─► greedy answers (ReMax)
                 ▲                                    │
                 └────── other prompts for them ◄─────┘   `dynamic_sampling`, at most `max_refills` times

Only rank 0 has an engine. It does all of this alone, and tells the others how far the data has been read, so ranks
cannot decide differently. Everything is a function of the seed, the step and the data cursor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple

from rewards.composition import RewardSet
from rollout.engine import Sampling
from rollout.loop import BackgroundLoop
from rollout.records import Rollout, RolloutStatus
from rollout.sampler import OnRollout, Sampler
from trainer.batch import TURN_REWARDS
from trainer.config import Config
from trainer.data import Prompts, Row
from trainer.distributed import Distributed
from trainer.shaping import overlong_penalty
from trainer.timing import Stopwatch

OVERLONG = "overlong"
"""Name of the length penalty among the rewards of a rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """Of this rank's engine; empty on ranks without one."""

    rollouts: tuple[Rollout, ...] = ()
    """All that were sampled to be trained, failed ones and those of dropped groups among them."""
    trained: tuple[Rollout, ...] = ()
    """Those that go on."""
    greedy_rewards: Mapping[int, float] = field(default_factory=dict)
    """By group id; empty unless the advantage needs them."""
    metrics: Mapping[str, float] = field(default_factory=dict)


class _Group(NamedTuple):
    row: Row
    rollouts: tuple[Rollout, ...]


class Collector:
    """Makes the rollouts of a step."""

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

    def collect(self, step: int, watch: Stopwatch, on_rollout: OnRollout = lambda rollout: None) -> Collected:
        """The rollouts of this step; a collective. Raises the error of rank 0 on all ranks."""
        sampler = self._sampler
        collected = self._distributed.together(
            lambda: Collected() if sampler is None else self._collect(sampler, step, watch, on_rollout)
        )
        self._prompts.cursor = self._distributed.broadcast(self._prompts.cursor)
        return collected

    def _collect(self, sampler: Sampler, step: int, watch: Stopwatch, on_rollout: OnRollout) -> Collected:
        self._rewards.take_metrics()  # forget what an evaluation scored
        groups = self._sample_groups(sampler, step, watch, on_rollout)
        kept = [group for group in groups if self._is_kept(group)]
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        trained = [rollout for group in kept for rollout in group.rollouts]
        metrics = {**self._rewards.take_metrics(), **sampler.take_metrics(), **self._prompts.metrics()}
        if self._config.algorithm.dynamic_sampling:
            metrics |= {
                "rollout/refill_factor": len(rollouts) / max(len(trained), 1),
                "rollout/dropped_groups": float(len(groups) - len(kept)),
                "reward/zero_std_fraction": 1 - sum(has_spread(group.rollouts) for group in groups) / len(groups),
            }
        if self._config.algorithm.advantage != "remax":
            return Collected(rollouts=tuple(rollouts), trained=tuple(trained), metrics=metrics)

        answers = self._greedy_answers(sampler, [group.row for group in kept], step, watch)
        pairs = zip(kept, answers, strict=True)
        baselines = {group.rollouts[0].group_id: answer.reward for group, answer in pairs if answer.is_trainable}
        judged = {rollout.rollout_id: _with_baseline(rollout, baselines) for rollout in trained}
        metrics |= {
            "reward/greedy_mean": sum(baselines.values()) / max(len(baselines), 1),
            "rollout/greedy_tokens": float(sum(answer.num_sampled for answer in answers)),
            "rollout/greedy_fraction": len(answers) / (len(answers) + len(rollouts)),
        }
        return Collected(
            rollouts=tuple(judged.get(rollout.rollout_id, rollout) for rollout in rollouts),
            trained=tuple(judged.values()),
            greedy_rewards=baselines,
            metrics=metrics,
        )

    def _sample_groups(self, sampler: Sampler, step: int, watch: Stopwatch, on_rollout: OnRollout) -> list[_Group]:
        """Groups until enough of them are kept, or the refills are used up. A group's id is its place in the list."""
        settings, algorithm = self._config.rollout, self._config.algorithm
        groups: list[_Group] = []
        for _ in range(1 + algorithm.max_refills if algorithm.dynamic_sampling else 1):
            missing = settings.prompts_per_step - sum(map(self._is_kept, groups))
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
                scored = [self._shape(rollout) for rollout in self._loop.run(self._rewards.score(sampled))]
            by_group = groupby(scored, key=lambda rollout: rollout.group_id)
            new = [_Group(row, tuple(found)) for row, (_, found) in zip(rows, by_group, strict=True)]
            for group in new:
                self._prompts.learn(group.row, [rollout.reward for rollout in group.rollouts if rollout.is_trainable])
            groups += new
        return groups

    def _is_kept(self, group: _Group) -> bool:
        return not self._config.algorithm.dynamic_sampling or has_spread(group.rollouts)

    def _greedy_answers(self, sampler: Sampler, rows: Sequence[Row], step: int, watch: Stopwatch) -> list[Rollout]:
        """One rollout per row at temperature 0, scored: ReMax's baseline. Never trained."""
        with watch.stage("rollout"):
            sampled = self._loop.run(
                sampler.collect(
                    rows, samples_per_prompt=1, sampling=replace(self._sampling, temperature=0.0), step=step
                )
            )
        with watch.stage("reward"):
            scored = self._loop.run(self._rewards.score(sampled))
        self._rewards.take_metrics()  # they would count as rewards of the next step
        return [self._shape(rollout) for rollout in scored]

    def _shape(self, rollout: Rollout) -> Rollout:
        """The rollout with what is added to its reward, each as a reward of its own: turns, length penalty."""
        algorithm = self._config.algorithm
        if not rollout.is_trainable:
            return rollout
        added: dict[str, float] = {}
        if algorithm.turn_rewards:
            given = rollout.outcome.get(TURN_REWARDS, ())
            if problem := _turn_rewards_problem(given, rollout.num_turns):
                return replace(rollout, status=RolloutStatus.FAILED, error=problem)
            added["turns"] = math.fsum(given)
        if algorithm.overlong_buffer:
            share = overlong_penalty(
                rollout.num_sampled, horizon=self._config.horizon, buffer=algorithm.overlong_buffer
            )
            added[OVERLONG] = algorithm.overlong_penalty * share
        if not added:
            return rollout
        return replace(rollout, reward=rollout.reward + sum(added.values()), rewards={**rollout.rewards, **added})


def has_spread(group: Sequence[Rollout]) -> bool:
    """Whether the group can say anything: two of its rollouts are trainable and differ in reward."""
    return len({rollout.reward for rollout in group if rollout.is_trainable}) > 1


def _with_baseline(rollout: Rollout, greedy_rewards: Mapping[int, float]) -> Rollout:
    """The rollout; FAILED where its baseline is missing, because its advantage is unknown, not zero."""
    if rollout.group_id in greedy_rewards or not rollout.is_trainable:
        return rollout
    return replace(rollout, status=RolloutStatus.FAILED, error="the greedy answer to its prompt failed: no baseline")


def _turn_rewards_problem(given: Any, num_turns: int) -> str | None:
    """Why these are not rewards of the turns, or None. Turns at the end that got nothing may be left out."""
    if not isinstance(given, (list, tuple)) or not all(isinstance(value, (int, float)) for value in given):
        return f"outcome {TURN_REWARDS} is {given!r:.200}; expected a list of numbers"
    if len(given) > num_turns or not all(map(math.isfinite, given)):
        return f"outcome {TURN_REWARDS} is {given!r:.200}; expected at most {num_turns} finite numbers, one per turn"
    return None
