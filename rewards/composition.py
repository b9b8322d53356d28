"""Several reward functions, weighted, on a batch of rollouts; what goes wrong in one is typed, counted and never a
zero.

Functions from files, and built-ins that may hang, run in processes that can be killed (`rewards/workers/pool.py`).
Others run in this process: sync ones in threads, async ones in the event loop, each with a deadline. That deadline
gives the run its turn back; it does not kill (what is not contained: `rollout/system/deadline.py`).
"""

from __future__ import annotations

import asyncio
import copy
import functools
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rewards.functions.built_in import ISOLATED
from rewards.outcomes import ERRORS, Outcome, Verdict, judge_batch, judge_call
from rewards.resolve import configure, resolve
from rewards.shaping import Shaping
from rewards.trl import BatchReward
from rewards.workers.pool import IsolatedReward, Isolation, WorkerPool
from rollout.errors import ConfigError, RewardError
from rollout.records import Rollout, RolloutStatus
from rollout.system.deadline import call_with_deadline

Policy = Literal["drop", "raise"] | float
"""What an error means: drop the rollout (status FAILED), end the run, or count as this explicit value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """One reward function with its name and weight."""

    name: str
    function: Callable[..., Any] | BatchReward | IsolatedReward
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ConfigError(f"reward {self.name}: the weight must be finite, found {self.weight}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultTolerance:
    """How much may go wrong."""

    timeout_s: float = 30.0
    """Wall-clock limit of one call, from its start: of one rollout, or of the whole batch for batch functions."""
    policies: Mapping[Outcome, Policy] = field(default_factory=dict)
    """By outcome; what is not named is `drop`."""
    max_error_rate: float = 0.5
    """The run ends when more than this share of the last `window` verdicts are errors."""
    window: int = 128
    concurrency: int = 16
    """Calls at the same time. Python threads share one interpreter: more of them make CPU-bound calls later, not
    sooner."""

    def __post_init__(self) -> None:
        if self.timeout_s <= 0 or self.window < 1 or self.concurrency < 1:
            raise ConfigError("reward: timeout_s, window and concurrency must be positive")
        for outcome, policy in self.policies.items():
            if outcome not in ERRORS:
                raise ConfigError(f"reward policy for {outcome!r}: expected one of {', '.join(ERRORS)}")
            if policy not in ("drop", "raise") and not (isinstance(policy, int | float) and math.isfinite(policy)):
                raise ConfigError(f"reward policy for {outcome}: expected drop, raise or a number, found {policy!r}")


@dataclass(slots=True)
class _Tally:
    """What happened since metrics were last taken."""

    values: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """By function."""
    errors: Counter[Outcome] = field(default_factory=Counter)
    num_dropped: int = 0


class RewardSet:
    """Scores rollouts with all its functions and keeps count of what happened."""

    def __init__(
        self, rewards: Sequence[Reward], tolerance: FaultTolerance | None = None, shaping: Shaping | None = None
    ) -> None:
        """Raises `ConfigError` without any function, or if two have the same name."""
        if not rewards:
            raise ConfigError("no reward function; set reward.functions, for example reward.functions=[exact_match]")
        twice = [name for name, count in Counter(reward.name for reward in rewards).items() if count > 1]
        if twice:
            raise ConfigError(f"two reward functions are named {twice[0]!r}")
        self._rewards = tuple(rewards)
        self._tolerance = tolerance or FaultTolerance()
        self._shaping = shaping or Shaping()
        self._recent: deque[bool] = deque(maxlen=self._tolerance.window)
        self._tally = _Tally()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(reward.name for reward in self._rewards)

    def load(self) -> None:
        """Load the models among the functions; on a rank that never scores, leave it out."""
        for reward in self._rewards:
            if isinstance(reward.function, BatchReward):
                reward.function.load()

    def close(self) -> None:
        """End the processes that functions run in. They also end with this process."""
        for reward in self._rewards:
            if isinstance(reward.function, IsolatedReward):
                reward.function.pool.close()

    async def score(
        self, rollouts: Sequence[Rollout], *, in_metrics: bool = True, is_shaped: bool = True
    ) -> list[Rollout]:
        """Return the rollouts, in order, with `rewards` by name and in `reward` their weighted sum plus the shaping.

        Rollouts that failed before, or ended before the first call (a prompt that fills the context), stay as they are.
        One whose reward fails becomes FAILED with the reason in `error` (policy `drop`); so does one that no function
        has an opinion on, because its reward is unknown, not zero.

        in_metrics: False keeps them out of `take_metrics` (not out of the error rate): they are not trained.
        is_shaped: False leaves the shaping out, for evaluation.

        Raises:
            RewardError: too many errors in the window, or an outcome whose policy is `raise`.
        """
        alive = [index for index, rollout in enumerate(rollouts) if _says_something(rollout)]
        batch = [rollouts[index] for index in alive]
        slots = asyncio.Semaphore(self._tolerance.concurrency)
        columns = await asyncio.gather(*(self._judge(reward, batch, slots) for reward in self._rewards))
        tally = self._tally if in_metrics else _Tally()  # looked up late: metrics may be taken during the await
        for reward, verdicts in zip(self._rewards, columns, strict=True):
            self._count(reward, verdicts, tally)
        scored = list(rollouts)
        for position, index in enumerate(alive):
            verdicts = {reward.name: column[position] for reward, column in zip(self._rewards, columns, strict=True)}
            scored[index] = self._combine(rollouts[index], verdicts, tally)
        return [self._shaping.apply(rollout) for rollout in scored] if is_shaped else scored

    def take_metrics(self) -> dict[str, float]:
        """Means by function and counts of errors since the last call of this method."""
        tally, self._tally = self._tally, _Tally()
        means = {name: sum(values) / len(values) for name in self.names if (values := tally.values[name])}
        metrics = {f"reward/{name}/mean": mean for name, mean in means.items()}
        metrics |= {f"reward/errors/{outcome}": float(tally.errors[outcome]) for outcome in ERRORS}
        metrics["reward/dropped"] = float(tally.num_dropped)
        return metrics

    async def _judge(self, reward: Reward, rollouts: Sequence[Rollout], slots: asyncio.Semaphore) -> list[Verdict]:
        if not rollouts:
            return []
        function = reward.function
        if isinstance(function, IsolatedReward):
            return await function.judge(rollouts, timeout_s=self._tolerance.timeout_s)
        if isinstance(function, BatchReward):
            finished = await self._call(slots, function.function, **function.arguments(rollouts))
            return judge_batch(finished, len(rollouts))
        # A copy for each call: a function that changes messages or the data row must not change what others read.
        calls = (self._call(slots, function, _private_copy(rollout)) for rollout in rollouts)
        return [judge_call(finished) for finished in await asyncio.gather(*calls)]

    async def _call(self, slots: asyncio.Semaphore, function: Callable[..., Any], *args: Any, **kwargs: Any):
        async with slots:
            return await call_with_deadline(
                functools.partial(function, *args, **kwargs), timeout_s=self._tolerance.timeout_s
            )

    def _count(self, reward: Reward, verdicts: Sequence[Verdict], tally: _Tally) -> None:
        for verdict in verdicts:
            self._recent.append(verdict.outcome.is_error)
            if verdict.outcome is Outcome.VALUE:
                tally.values[reward.name].append(verdict.value)
            elif verdict.outcome.is_error:
                tally.errors[verdict.outcome] += 1
                if self._tolerance.policies.get(verdict.outcome) == "raise":
                    raise RewardError(f"reward {reward.name}: {verdict.outcome}: {verdict.detail}")
        window = self._tolerance.window
        rate = sum(self._recent) / len(self._recent) if self._recent else 0.0
        if len(self._recent) == window and rate > self._tolerance.max_error_rate:
            last = next((verdict for verdict in reversed(verdicts) if verdict.outcome.is_error), None)
            what = f"; the last one, of {reward.name}: {last.outcome}: {last.detail}" if last is not None else ""
            raise RewardError(
                f"{rate:.0%} of the last {window} reward calls failed, at most {self._tolerance.max_error_rate:.0%} "
                f"may{what}"
            )

    def _combine(self, rollout: Rollout, verdicts: Mapping[str, Verdict], tally: _Tally) -> Rollout:
        values: dict[str, float] = {}
        for name, verdict in verdicts.items():
            if verdict.outcome is Outcome.VALUE:
                values[name] = verdict.value
            elif verdict.outcome.is_error:
                policy = self._tolerance.policies.get(verdict.outcome, "drop")
                if isinstance(policy, str):
                    return _dropped(rollout, f"reward {name}: {verdict.outcome}: {verdict.detail}", tally)
                values[name] = float(policy)
        if not values:
            return _dropped(rollout, "no reward function applies to this rollout", tally)
        total = sum(reward.weight * values[reward.name] for reward in self._rewards if reward.name in values)
        return replace(rollout, rewards=values, reward=total)


def _says_something(rollout: Rollout) -> bool:
    is_over_early = rollout.status is not RolloutStatus.COMPLETED and not rollout.calls
    return rollout.status is not RolloutStatus.FAILED and not is_over_early


def _dropped(rollout: Rollout, reason: str, tally: _Tally) -> Rollout:
    tally.num_dropped += 1
    return replace(rollout, status=RolloutStatus.FAILED, error=reason, rewards={}, reward=0.0)


def make_reward_set(
    functions: Sequence[str],
    weights: Sequence[float] | None = None,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    tolerance: FaultTolerance | None = None,
    isolation: Isolation | None = None,
    shaping: Shaping | None = None,
) -> RewardSet:
    """A reward set from settings: functions by built-in name or `path/to/file.py:name`, with keyword settings by name.

    A function of a file that has a parameter `completions` is called the way TRL calls it; any other gets a `Rollout`.
    Files are loaded in worker processes, not here (unless isolation.mode is `thread`): what a function keeps in its
    module is then kept per worker.

    Raises:
        ConfigError: an unknown name, a file that cannot be loaded, settings that do not fit, or unequal lengths.
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
        Reward(name=name, function=_prepare(spec, dict((settings or {}).get(name, {})), pool, isolation), weight=weight)
        for name, spec, weight in zip(names, functions, weights or [1.0] * len(functions), strict=True)
    ]
    return RewardSet(rewards, tolerance, shaping)


def _prepare(
    spec: str, settings: Mapping[str, Any], pool: WorkerPool, isolation: Isolation
) -> Callable[..., Any] | BatchReward | IsolatedReward:
    path, colon, name = spec.rpartition(":")
    if colon and isolation.mode == "process":
        return pool.load(f"{Path(path).expanduser().resolve()}:{name}", settings)
    function = configure(*resolve(spec), settings)
    # What ships with Lockstep is known not to take batches here, and need not be asked in a process.
    isolated = spec in ISOLATED
    return IsolatedReward(pool=pool, spec=spec, settings=settings, is_batch=False) if isolated else function


def _private_copy(rollout: Rollout) -> Rollout:
    return replace(rollout, messages=copy.deepcopy(rollout.messages), example=copy.deepcopy(rollout.example))
