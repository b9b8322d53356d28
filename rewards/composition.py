"""Weighted sum of reward functions over a batch of rollouts; failures are typed and counted, and never become a zero.

Functions from files, and built-ins that may hang, run in processes that can be killed (`rewards/workers/pool.py`).
Others run in this process, with a deadline that frees the run and does not end them (`rollout/system/deadline.py`).
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from lockstep.rewards.batches import BatchReward, Scope, Slots, each
from lockstep.rewards.functions import ISOLATED, runs_in_worker
from lockstep.rewards.meter import METRIC, Meter
from lockstep.rewards.outcomes import ERRORS, MAX_REWARD, Outcome, Verdict
from lockstep.rewards.resolve import resolve
from lockstep.rewards.shaping import Shaping
from lockstep.rewards.workers.pool import IsolatedReward, Isolation, WorkerPool
from lockstep.rollout.errors import ConfigError, RewardError
from lockstep.rollout.records import Cause, Rollout, RolloutStatus, at_row
from lockstep.rollout.system.user_functions import is_object, written_at

OnError = Literal["drop", "raise"] | float
"""Action on an error: drop the rollout (status FAILED), end the run, or use this number as the value."""

DOES_NOT_APPLY = "no reward function applies to this rollout: each returned None"
"""Error of a rollout for which all functions return None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A reward function with its name and weight."""

    name: str
    function: Callable[..., Any] | BatchReward | IsolatedReward
    weight: float = 1.0
    place: str = ""
    """Line and file of a user's function."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ConfigError(f"reward {self.name}: found weight {self.weight}, expected a finite number")

    def failure(self, verdict: Verdict) -> str:
        """Return a failed verdict in words, with a line of the user's code."""
        is_named = self.place.rpartition(" of ")[2] in verdict.detail
        return f"reward {self.name}: {verdict.outcome}: {verdict.detail}{'' if is_named else f' ({self.place})'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultTolerance:
    """Limits on failures, and the action on each kind."""

    timeout_s: float = 30.0
    """Wall-clock limit of one call from its start; one call scores a rollout, a group, or with TRL's signature all."""
    on_error: Mapping[Outcome, OnError] = field(default_factory=dict)
    """By outcome; `drop` where none is named."""
    max_error_rate: float = 0.5
    """End the run if more than this share of the calls of a step are errors."""
    concurrency: int = 16
    """Maximum number of concurrent calls in this process. Its threads share one interpreter, so more of them only delay
    CPU-bound functions."""

    def __post_init__(self) -> None:
        if self.timeout_s <= 0 or self.concurrency < 1:
            raise ConfigError(
                f"reward: found timeout_s={self.timeout_s}, concurrency={self.concurrency}; expected positive numbers"
            )
        for outcome, action in self.on_error.items():
            if outcome not in ERRORS:
                raise ConfigError(f"reward.on_error names {outcome!r}; expected one of {', '.join(ERRORS)}")
            if action not in ("drop", "raise") and not (isinstance(action, int | float) and math.isfinite(action)):
                raise ConfigError(f"reward.on_error.{outcome}={action!r}; expected drop, raise or a number")


@dataclass(slots=True)
class Tally:
    """Values and errors of reward calls."""

    values: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """By name of the function."""
    num_calls: int = 0
    errors: Counter[Outcome] = field(default_factory=Counter)
    first: str = ""
    """First error, in words."""
    meters: defaultdict[str, Meter] = field(default_factory=lambda: defaultdict(Meter))
    """Measures of the functions themselves, by name of the function."""

    def add(self, other: Tally) -> None:
        """Add those of other calls."""
        for name, values in other.values.items():
            self.values[name] += values
        self.num_calls += other.num_calls
        self.errors.update(other.errors)
        self.first = self.first or other.first
        for name, meter in other.meters.items():
            self.meters[name].merge(meter.sums, meter.counts)


class RewardSet:
    """Reward functions that score rollouts together, with the shaping, the error limits and the metrics."""

    def __init__(
        self, rewards: Sequence[Reward], tolerance: FaultTolerance | None = None, shaping: Shaping | None = None
    ) -> None:
        """Raises `ConfigError` for an empty sequence, or if two functions have the same name."""
        if not rewards:
            raise ConfigError("no reward function; set reward.functions, for example reward.functions=[exact_match]")
        twice = [name for name, count in Counter(reward.name for reward in rewards).items() if count > 1]
        if twice:
            raise ConfigError(f"two reward functions are named {twice[0]!r}; rename one, or leave it out")
        self._rewards = tuple(rewards)
        self._tolerance = tolerance or FaultTolerance()
        self._shaping = shaping or Shaping()
        self._tally = Tally()
        self.num_updates = 0
        """Optimizer updates of the run, for functions that ask; 0: unknown."""

    @property
    def compares_groups(self) -> bool:
        """True if a function is group-wise."""
        return Scope.GROUP in self._scopes

    @property
    def compares_batches(self) -> bool:
        """True if a function sees all rollouts of a step in one call, so that none can be scored before the last."""
        return Scope.BATCH in self._scopes

    @property
    def _scopes(self) -> set[Scope]:
        functions = (reward.function for reward in self._rewards)
        return {function.scope for function in functions if isinstance(function, BatchReward | IsolatedReward)}

    def slots(self) -> Slots:
        """Return limits that several calls of `score` can share."""
        return Slots(self._tolerance.concurrency)

    def load(self) -> None:
        """Load the reward models among the functions. Only ranks that score need it."""
        for reward in self._rewards:
            if isinstance(reward.function, BatchReward):
                reward.function.load()

    def close(self) -> None:
        """End the worker processes. They also end with this process."""
        for reward in self._rewards:
            if isinstance(reward.function, IsolatedReward):
                reward.function.pool.close()

    async def score(
        self,
        rollouts: Sequence[Rollout],
        *,
        tally: Tally | None = None,
        is_shaped: bool = True,
        slots: Slots | None = None,
    ) -> list[Rollout]:
        """Return the rollouts, in order, with `rewards` by name and in `reward` their weighted sum plus the shaping.

        rollouts: whole groups, because length control and group-wise functions compare them.

        Rollouts that failed before, or ended before the first call (a prompt that fills the context), stay unchanged.
        A rollout whose reward fails becomes FAILED with the reason in `error` (`drop`); so does one to which no
        function applies, because its reward is unknown, not zero.

        Raises `RewardError` for an outcome with the action `raise`.

        tally: counts these calls, so that `take_metrics` leaves them out; None: that of this set.
        is_shaped: False leaves the shaping out, for evaluation. slots: shared with other calls; None: its own.
        """
        alive = [index for index, rollout in enumerate(rollouts) if _is_scored(rollout)]
        batch = [rollouts[index] for index in alive]
        slots = slots or self.slots()
        meters = [Meter(num_updates=self.num_updates) for _ in self._rewards]
        judging = zip(self._rewards, meters, strict=True)
        columns = await asyncio.gather(*(self._judge(reward, batch, slots, meter) for reward, meter in judging))
        tally = self._tally if tally is None else tally  # looked up late: metrics may be taken during the await
        for reward, verdicts, meter in zip(self._rewards, columns, meters, strict=True):
            tally.meters[reward.name].merge(meter.sums, meter.counts)
            self._count(reward, batch, verdicts, tally)
        scored_rollouts = list(rollouts)
        for index, verdicts in zip(alive, zip(*columns, strict=True), strict=True):
            scored_rollouts[index] = self._combine(rollouts[index], verdicts, tally)
        return self._shaping.apply_to(scored_rollouts) if is_shaped else scored_rollouts

    def refuse_errors(self, tally: Tally | None = None) -> None:
        """Raise `RewardError` if too large a share of the calls are errors. tally: None: since `take_metrics`."""
        tally = tally or self._tally
        number, limit = sum(tally.errors.values()), self._tolerance.max_error_rate
        if number > limit * tally.num_calls:
            raise RewardError(
                f"{number} of {tally.num_calls} reward calls failed, expected at most {limit:.0%} of a step "
                f"(reward.max_error_rate); the first one: {tally.first}"
            )

    def take_tally(self) -> Tally:
        """Return the counts since the last call, for `add` on another rank."""
        tally, self._tally = self._tally, Tally()
        return tally

    def add(self, tally: Tally) -> None:
        """Add the counts of another rank."""
        self._tally.add(tally)

    def take_metrics(self) -> dict[str, float]:
        """Return means and measures by function and counts of errors since the last call of this method."""
        tally = self.take_tally()
        names = (reward.name for reward in self._rewards)
        metrics = {
            f"reward/{name}/mean": math.fsum(values) / len(values) for name in names if (values := tally.values[name])
        }
        metrics |= {f"reward/errors/{outcome}": float(tally.errors[outcome]) for outcome in ERRORS}
        for name, meter in tally.meters.items():
            for measure, value in meter.read().items():
                room = "reward" if measure.startswith(METRIC) else "judge"
                metrics[f"{room}/{name}/{measure}"] = float(value)
        return metrics

    async def _judge(self, reward: Reward, rollouts: Sequence[Rollout], slots: Slots, meter: Meter) -> list[Verdict]:
        function, timeout_s, by_turn = reward.function, self._tolerance.timeout_s, self._shaping.turn_rewards
        if not rollouts:
            return []
        if isinstance(function, IsolatedReward):
            return await function.judge(rollouts, meter, timeout_s=timeout_s, by_turn=by_turn)
        batch = function if isinstance(function, BatchReward) else each(function)
        return await batch.judge(rollouts, meter, slots=slots, timeout_s=timeout_s, by_turn=by_turn)

    def _count(self, reward: Reward, rollouts: Sequence[Rollout], verdicts: Sequence[Verdict], tally: Tally) -> None:
        tally.num_calls += len(verdicts)
        for rollout, verdict in zip(rollouts, verdicts, strict=True):
            if verdict.outcome is Outcome.VALUE:
                tally.values[reward.name].append(verdict.value)
            elif verdict.outcome.is_error:
                tally.errors[verdict.outcome] += 1
                sentence = at_row(reward.failure(verdict), rollout.example)
                tally.first = tally.first or sentence
                if self._tolerance.on_error.get(verdict.outcome) == "raise":
                    raise RewardError(sentence)

    def _combine(self, rollout: Rollout, verdicts: Sequence[Verdict], tally: Tally) -> Rollout:
        values: dict[str, float] = {}
        by_turn: list[tuple[float, ...]] = []
        for reward, verdict in zip(self._rewards, verdicts, strict=True):
            if verdict.logged:
                rollout = replace(rollout, logged={**rollout.logged, reward.name: verdict.logged})
            if verdict.outcome is Outcome.VALUE:
                values[reward.name] = verdict.value
                if verdict.turns:
                    by_turn.append(tuple(reward.weight * value for value in verdict.turns))
            elif verdict.outcome.is_error:
                action = self._tolerance.on_error.get(verdict.outcome, "drop")
                if isinstance(action, str):
                    return _failed(rollout, reward.failure(verdict), Cause.REWARD)
                values[reward.name] = float(action)
        if not values:
            return _failed(rollout, DOES_NOT_APPLY, Cause.UNSCORED)
        total = sum(reward.weight * values[reward.name] for reward in self._rewards if reward.name in values)
        turn_rewards = tuple(map(sum, zip(*by_turn, strict=True)))
        if not all(abs(value) <= MAX_REWARD for value in (total, *turn_rewards)):
            tally.errors[Outcome.NON_FINITE] += 1
            problem = f"{Outcome.NON_FINITE}: the weighted sum of its rewards is {total}: {values}"
            return _failed(rollout, problem, Cause.REWARD)
        return replace(rollout, rewards=values, reward=total, turn_rewards=turn_rewards)


def _is_scored(rollout: Rollout) -> bool:
    is_over_early = rollout.status is not RolloutStatus.COMPLETED and not rollout.calls
    return rollout.status is not RolloutStatus.FAILED and not is_over_early


def _failed(rollout: Rollout, reason: str, cause: Cause) -> Rollout:
    status = RolloutStatus.FAILED
    return replace(rollout, status=status, error=reason, cause=cause, rewards={}, reward=0.0, turn_rewards=())


def make_reward_set(
    functions: Sequence[str],
    weights: Sequence[float] | None = None,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    tolerance: FaultTolerance | None = None,
    isolation: Isolation | None = None,
    shaping: Shaping | None = None,
) -> RewardSet:
    """Build a reward set from functions by built-in name or `path/to/file.py:name`, with keyword settings by name.

    The parameters of a function decide how it is called (`rewards/signatures.py`).
    Worker processes load the files, not this one (unless isolation.mode is `thread`), so each worker has its own state
    of the function's module. Raises `ConfigError`: an unknown name, a file that cannot be loaded, settings that do not
    fit, or unequal lengths.
    """
    if weights is not None and len(weights) != len(functions):
        raise ConfigError(f"reward.weights has {len(weights)} values for {len(functions)} reward.functions")
    names = [spec.rpartition(":")[2] for spec in functions]
    unused = sorted(set(settings or {}) - set(names))
    if unused:
        raise ConfigError(
            f"reward.settings names {unused[0]!r}, which is not among reward.functions: {', '.join(names)}"
        )
    isolation = isolation or Isolation()
    pool = WorkerPool(isolation)
    rewards = [
        Reward(
            name=name,
            function=_prepare(spec, dict((settings or {}).get(name, {})), pool, isolation),
            weight=weight,
            place=written_at(spec) if ":" in spec else "",
        )
        for name, spec, weight in zip(names, functions, weights or [1.0] * len(functions), strict=True)
    ]
    return RewardSet(rewards, tolerance, shaping)


def _prepare(
    spec: str, settings: Mapping[str, Any], pool: WorkerPool, isolation: Isolation
) -> BatchReward | IsolatedReward:
    if runs_in_worker(spec, isolation.mode):
        path, _, name = spec.rpartition(":")
        place = spec if is_object(spec) else f"{Path(path).expanduser().resolve()}:{name}"
        return pool.load(place, settings)
    function = resolve(spec, settings)
    if spec in ISOLATED:
        return IsolatedReward(pool=pool, spec=spec, settings=settings, scope=function.scope)
    return function
