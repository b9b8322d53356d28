"""Subject of an examination: an environment with its data rows, rewards and chat, and ways to play and score it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from lockstep.lab.environments.scripted_engine import ScriptedEngine
from lockstep.lab.environments.watched_environment import (
    Fault,
    FaultKind,
    Watch,
    Watched,
    watch_environment,
)
from lockstep.rewards.composition import RewardSet, Tally
from lockstep.rewards.outcomes import Outcome
from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.chat.messages import Tools
from lockstep.rollout.engine.protocol import Engine, Sampling
from lockstep.rollout.environments import make_environment
from lockstep.rollout.environments.mixed import AnyEnvironment, environment_of
from lockstep.rollout.records import Cause, Message, Rollout, RolloutStatus
from lockstep.rollout.safe_text import error_text
from lockstep.rollout.sampler.sampler import Sampler
from lockstep.trainer.build import make_gateway_settings, make_sampling
from lockstep.trainer.config.schema import Config
from lockstep.trainer.data.prompts import Row

Answer = str | Message
"""An assistant turn: its text, or a message with tool calls."""
Player = Callable[[Sequence[Message]], Awaitable[Answer]]
"""Function of the conversation so far; returns the next turn of the assistant."""


MAX_TIMEOUTS = 3
"""Calls of reward functions that may reach their time limit: each costs it."""


class Hung(Exception):
    """Calls that do not return; further ones would cost their time limit each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of an examination beside the settings of training."""

    rows: int = 8
    """Data rows that are examined."""
    samples: int = 4
    """Episodes of the real engine per row."""
    deadline_s: float = 10.0
    """Wall-clock limit of one call of the environment or of a reward function."""
    reference: str | None = None
    """Column with the reference answer; None: found by name."""
    forms: tuple[str, ...] = ()
    """Texts around the reference, with {answer}; empty: the usual ones are tried."""
    player: str | None = None
    """Function `path/to/file.py:name` of messages and row that plays perfectly; None: the reference is the answer."""
    reads: tuple[str, ...] = ()
    """Columns that rewards may read beside the reference."""


@dataclass(slots=True, kw_only=True)
class Subject:
    config: Config
    chat: Chat
    rows: Sequence[Row]
    rewards: RewardSet
    options: Options
    watch: Watch
    played: list[Rollout] = field(default_factory=list)
    """All scripted episodes, unscored."""
    tools: Tools = ()
    """Tools of the episode that was played last."""
    hanging_tools: list[str] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)
    """Sentences of rewards that failed, counted."""
    num_scored: int = 0

    @property
    def sampling(self) -> Sampling:
        return make_sampling(self.config.rollout, self.chat, with_routes=self.config.plan.replays_engine)

    async def play(self, row: Row, player: Player, *, may_hang: bool = False) -> Rollout:
        """Play one episode with the turns of a player. Faults of the environment are kept in `watch`.

        Raises `Hung` if a call of the environment did not return, unless it may hang.
        """
        environments: list[AnyEnvironment] = []
        num_faults = len(self.watch.faults)

        async def answer(prompt_ids: Sequence[int]) -> Sequence[int]:
            environment = environment_of(environments[-1], row)
            messages = environment.messages if isinstance(environment, Watched) else []
            tools = environment.tools if isinstance(environment, Watched) else ()
            self.tools = tools
            turn = await player(messages)
            if isinstance(turn, str):
                return self.chat.tokenizer.encode(turn, add_special_tokens=False)
            return self.chat.turn([*messages, turn], tools)[:-1]

        engine = ScriptedEngine(answer, max_model_len=self.config.rollout.max_model_len)
        (rollout,) = await self.collect(engine, [row], samples=1, made=environments)
        rollout = replace(rollout, group_id=len(self.played))  # a group of its own, whatever is scored with it
        self.played.append(rollout)
        if not may_hang and any(fault.kind is FaultKind.HUNG for fault in self.watch.faults[num_faults:]):
            raise Hung
        return rollout

    async def say(self, row: Row, text: Answer) -> Rollout:
        """Play one episode whose turns are all the same."""

        async def player(messages: Sequence[Message]) -> Answer:
            return text

        return await self.play(row, player)

    async def collect(
        self,
        engine: Engine,
        rows: Sequence[Row],
        *,
        samples: int,
        first_group: int = 0,
        made: list[AnyEnvironment] | None = None,
    ) -> list[Rollout]:
        """Play episodes as a step of training does. An error of the episode makes FAILED rollouts.

        made: receives the environments.
        """

        def make() -> AnyEnvironment:
            try:
                environment = make_environment(self.config.environment.name, **self.config.environment.settings)
            except Exception as error:  # of a user's constructor
                self._raised("the constructor", error)
                raise
            wrapper = watch_environment(environment, self.watch)
            if made is not None:
                made.append(wrapper)
            return wrapper

        sampler = Sampler(
            engine=engine,
            chat=self.chat,
            make_environment=make,
            max_turns=self.config.max_turns,
            seed=self.config.seed,
            gateway=make_gateway_settings(self.config.gateway, self.config.model),
        )
        collect = partial(sampler.collect, sampling=self.sampling, step=0)
        try:
            group_ids = range(first_group, first_group + len(rows))
            return await collect(rows, samples_per_prompt=samples, group_ids=group_ids)
        except Exception as error:  # of a user's file, or of a row that it refuses
            text = self._raised("the episode", error)
            return [
                Rollout(
                    rollout_id=group * samples + number,
                    group_id=group,
                    calls=(),
                    example=row,
                    status=RolloutStatus.FAILED,
                    error=text,
                )
                for group, row in enumerate(rows, first_group)
                for number in range(samples)
            ]

    def _raised(self, place: str, error: Exception) -> str:
        text = f"raised {type(error).__name__}: {error_text(error)}"
        self.watch.faults.append(Fault(place=place, kind=FaultKind.RAISED, text=text))
        return text

    async def score(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return the rollouts with their rewards; those whose reward failed are FAILED, and counted in `errors`.

        A rollout alone in its group is not counted if group-wise functions have nothing to compare it with.

        Raises `Hung` after `MAX_TIMEOUTS` calls of reward functions that did not return.
        """
        tally = Tally()
        scored_rollouts = await self.rewards.score(rollouts, tally=tally, is_shaped=False)
        self.rewards.refuse_errors(tally)
        sizes = Counter(rollout.group_id for rollout in rollouts)
        for before, after in zip(rollouts, scored_rollouts, strict=True):
            is_alone = self.rewards.compares_groups and sizes[after.group_id] == 1
            if is_alone and after.cause is Cause.UNSCORED:
                continue
            if after.status is RolloutStatus.FAILED and before.status is not RolloutStatus.FAILED:
                sentence = str(after.error)
                self.errors[sentence] = self.errors.get(sentence, 0) + 1
        self.num_scored += sum(rollout.status is not RolloutStatus.FAILED for rollout in rollouts)
        if (
            sum(count for sentence, count in self.errors.items() if f": {Outcome.TIMEOUT}: " in sentence)
            >= MAX_TIMEOUTS
        ):
            raise Hung
        return scored_rollouts

    async def earn(self, rows: Sequence[Row], answers: Sequence[Answer]) -> list[Rollout]:
        """Play one answer per row and score the episodes."""
        return await self.score([await self.say(row, text) for row, text in zip(rows, answers, strict=True)])


def reward_of(rollout: Rollout) -> float | None:
    """Return the reward; None if there is none, because the episode or a reward function failed."""
    is_scored = rollout.status is not RolloutStatus.FAILED and bool(rollout.rewards)
    return rollout.reward if is_scored else None


def with_value(row: Row, column: str, value: Any) -> Mapping[str, Any]:
    return {**row, column: value}
