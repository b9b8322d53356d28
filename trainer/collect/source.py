"""Synchronous rollouts, sampled by the weights of their step.

    prompts ─► sample ─► score ─► drop groups without spread ─► greedy answers (ReMax)
                 ▲                          │
                 └─ other prompts for them ◄┘   `dynamic_sampling`, at most `max_refills` times

Rank 0 chooses the prompts, keeps the records of the curriculum, and broadcasts the position in the data, so ranks
cannot decide differently. The drivers sample and score (`trainer/collect/episodes.py`). Everything is a function of the
seed, the step, the position and these records. `trainer/collect/async_source.py` samples while the trainer works.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, replace

from lockstep.rewards.composition import Tally
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.sampler.sampler import OnRollout
from lockstep.trainer.collect.episodes import Episodes
from lockstep.trainer.collect.groups import Collected, Group, is_kept, rewards_of
from lockstep.trainer.config.schema import Config
from lockstep.trainer.data.prompts import Position, Prompts
from lockstep.trainer.stopwatch import Stopwatch


class RolloutSource(ABC):
    """Source of the rollouts of a step."""

    def __init__(self, config: Config, *, episodes: Episodes, sampling: Sampling, prompts: Prompts) -> None:
        self._config = config
        self._algorithm = config.algorithm
        self._episodes = episodes
        self._drivers = episodes.drivers
        self._sampler = episodes.sampler
        self._rewards = episodes.rewards
        self._sampling = sampling
        self._prompts = prompts

    @abstractmethod
    def collect(
        self, step: int, version: int, watch: Stopwatch, on_rollout: OnRollout = lambda rollout: None
    ) -> Collected:
        """Return the rollouts of this step; a collective. Raises the error of any rank on all ranks.

        version: weights of the engine, which the rollouts will train. on_rollout: called on rank 0, as in
        `Episodes.groups`.
        """

    @abstractmethod
    def forget(self) -> None:
        """Cancel rollouts in flight, after a failed `collect` or between two; their prompts are sampled again."""

    @abstractmethod
    def close(self) -> None:
        """End rollouts in flight."""

    def _take_metrics(self) -> dict[str, float]:
        """Return the metrics of rewards and sampling since the last call, and of the data."""
        sampler_metrics = self._sampler.take_metrics() if self._sampler is not None else {}
        return {**self._rewards.take_metrics(), **sampler_metrics, **self._prompts.metrics()}


class Collector(RolloutSource):
    """Synchronous source: all rollouts of a step come from its weights."""

    _before: Position | None = None
    """Position before an unfinished `collect`, which has reported nothing to the curriculum yet."""

    def collect(
        self, step: int, version: int, watch: Stopwatch, on_rollout: OnRollout = lambda rollout: None
    ) -> Collected:
        self._before = self._prompts.position
        groups = self._sample_groups(step, watch, on_rollout)
        greedy = self._greedy_answers(groups, step, watch) if self._config.plan.needs_greedy else []
        self._episodes.hand_over()
        is_main = self._drivers.is_main
        collection = self._drivers.together(lambda: self._collected(groups, greedy) if is_main else Collected())
        self._before = None
        self._prompts.restore(Position(**self._drivers.decide(lambda: asdict(self._prompts.position))))
        return collection

    def forget(self) -> None:
        if self._before is not None:
            self._prompts.restore(self._before)
            self._before = None
        self._take_metrics()  # of rollouts that are sampled again

    def close(self) -> None:
        """Do nothing: no rollout is in flight between two steps."""

    def _collected(self, groups: list[tuple[int, Group]], greedy: list[Group]) -> Collected:
        """Combine the groups of the step on rank 0. greedy: groups of one answer to the prompt of each kept group."""
        kept_groups = [group for _, group in groups if is_kept(group, self._algorithm)]
        dropped_groups = [group for _, group in groups if not is_kept(group, self._algorithm)]
        answers = [answer for group in greedy for answer in group]
        collection = Collected.of(kept_groups, dropped_groups, answers, self._algorithm)
        for place, group in groups:
            self._prompts.learn(place, rewards_of(group))
        self._prompts.finish(place for place, _ in groups)
        self._rewards.refuse_errors()
        return replace(collection, metrics={**self._take_metrics(), **collection.metrics})

    def _sample_groups(self, step: int, watch: Stopwatch, on_rollout: OnRollout) -> list[tuple[int, Group]]:
        """Sample groups until enough are kept or the refills are used up. A group's id is its index in the list.

        Returns on rank 0 the place of its row in the data, and the group; nothing on other ranks.
        """
        settings, algorithm = self._config.rollout, self._algorithm
        groups: list[tuple[int, Group]] = []
        num_begun = 0

        def begin() -> list[int]:
            missing = settings.prompts_per_step - sum(is_kept(group, algorithm) for _, group in groups)
            return self._prompts.begin(missing)

        for _ in range(1 + algorithm.max_refills if algorithm.dynamic_sampling else 1):
            places = self._drivers.decide(begin)
            if not places:
                break
            sampled_groups = self._episodes.groups(
                places,
                self._prompts.rows,
                samples_per_prompt=settings.samples_per_prompt,
                sampling=self._sampling,
                step=step,
                stage=watch.stage,
                first_group=num_begun,
                on_rollout=on_rollout,
            )
            groups += zip(places, sampled_groups, strict=True) if self._drivers.is_main else ()
            num_begun += len(places)
        return groups

    def _greedy_answers(self, groups: list[tuple[int, Group]], step: int, watch: Stopwatch) -> list[Group]:
        """Sample and score one rollout per kept group at temperature 0, ReMax's baseline, which is never trained."""
        places = self._drivers.decide(lambda: [place for place, group in groups if is_kept(group, self._algorithm)])
        return [
            *self._episodes.groups(
                places,
                self._prompts.rows,
                samples_per_prompt=1,
                sampling=replace(self._sampling, temperature=0.0),
                step=step,
                stage=watch.stage,
                tally=Tally(),
            )
        ]
