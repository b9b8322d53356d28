"""Asynchronous rollouts: when groups begin, in which order they are trained, staleness, errors, the end."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.errors import EngineError
from lockstep.rollout.records import EngineCall, FinishReason, Rollout, VersionSpan
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.trainer.collect.async_source import Producer
from lockstep.trainer.collect.collect_log import Collection
from lockstep.trainer.collect.driving import Drivers
from lockstep.trainer.collect.episodes import Episodes
from lockstep.trainer.collect.groups import Collected
from lockstep.trainer.config.schema import Config
from lockstep.trainer.data.prompts import Prompts
from lockstep.trainer.stopwatch import Stopwatch

BATCH, GROUP = 3, 2


class Sampler:
    """Source of groups with durations set by the test, sampled by the weights of `version`."""

    def __init__(self) -> None:
        self.version = 0
        self.begun: list[int] = []
        self.cancelled: list[int] = []
        self.held: dict[int, asyncio.Event] = {}
        self.failing: dict[int, Exception] = {}
        self.duration: Callable[[], float] = lambda: 0.0
        self.num_open = 0

    @asynccontextmanager
    async def open(self, sampling: Sampling):
        self.num_open += 1
        yield self
        self.num_open -= 1

    async def collect(self, examples, *, samples_per_prompt, sampling, step, group_ids, run):
        assert run is self
        (first_group,) = group_ids
        assert self.num_open == 1
        is_greedy = sampling.temperature == 0
        if not is_greedy:
            self.begun.append(first_group)
        first_version = self.version
        try:
            await asyncio.sleep(self.duration())
            if first_group in self.held:
                await self.held[first_group].wait()
        except asyncio.CancelledError:
            self.cancelled.append(first_group)
            raise
        if first_group in self.failing:
            raise self.failing[first_group]
        spans = (
            VersionSpan(version=first_version, start=0, end=1),
            VersionSpan(version=self.version, start=1, end=3),
        )
        call = EngineCall(
            prompt_ids=(1,), sampled_ids=(5,) * 3, sampled_logprobs=(-1.0,) * 3, finish_reason=FinishReason.STOP,
            version_spans=spans,
        )  # fmt: skip
        return [
            Rollout(rollout_id=first_group * samples_per_prompt + i, group_id=first_group, calls=(call,),
                    example=examples[0])
            for i in range(samples_per_prompt)
        ]  # fmt: skip

    def take_metrics(self) -> dict[str, float]:
        return {}


class Rewards:
    def __init__(self, reward: Callable[[Rollout], float]) -> None:
        self._reward = reward

    async def score(self, rollouts, *, tally=None):
        return [replace(rollout, reward=self._reward(rollout)) for rollout in rollouts]

    def refuse_errors(self, tally=None) -> None: ...

    def take_metrics(self) -> dict[str, float]:
        return {}


class Run:
    """A producer with its collaborators; `train` is one step."""

    def __init__(self, loop: BackgroundLoop, *, max_staleness: int = 1, reward=lambda rollout: 0.0, **settings: Any):
        config = Config(updates=settings.pop("updates", 1000))
        config.rollout.prompts_per_step, config.rollout.samples_per_prompt = BATCH, GROUP
        config.rollout.max_staleness = max_staleness
        config.rollout.stragglers = settings.pop("stragglers", "wait")
        config.data.curriculum.weighting = settings.pop("weighting", "uniform")
        rows = [{"n": n} for n in range(settings.pop("rows", 10_000))]
        for name, value in settings.items():
            setattr(config.algorithm, name, value)
        self.loop = loop
        self.updates_per_step = config.algorithm.epochs * config.algorithm.minibatches
        self.sampler = Sampler()
        self.prompts = Prompts([rows], seed=0, shuffle=False, curriculum=config.data.curriculum)
        drivers = Drivers(loop)
        episodes = Episodes(drivers=drivers, sampler=self.sampler, rewards=Rewards(reward))  # type: ignore[arg-type]
        self.log: list[Collection] = []
        self.producer = Producer(
            config,
            log=self.log,
            episodes=episodes,
            sampling=Sampling(max_tokens=8),
            prompts=self.prompts,  # type: ignore[arg-type]
        )
        self.shown: list[Rollout] = []

    def collect(self) -> Collected:
        return self.producer.collect(0, self.sampler.version, Stopwatch(), self.shown.append)

    def train(self) -> list[int]:
        """Run one step; return the places of the groups that it trained."""
        collected = self.collect()
        self.sampler.version += self.updates_per_step
        return sorted({rollout.group_id for rollout in collected.trained})

    def hold(self, *places: int) -> None:
        self.sampler.held.update({place: asyncio.Event() for place in places})

    def release(self, *places: int) -> None:
        async def now() -> None:
            for place in places:
                self.sampler.held[place].set()

        self.loop.run(now())

    def settle(self) -> None:
        """Wait until all groups that are not held are complete."""
        deadline = time.monotonic() + 10
        while any(not task.done() and place not in self.sampler.held for place, task in self.producer._tasks.items()):
            assert time.monotonic() < deadline
            time.sleep(0.001)


@pytest.fixture
def loop() -> Iterator[BackgroundLoop]:
    with BackgroundLoop() as loop:
        yield loop


def test_the_next_batch_is_sampled_while_this_one_is_trained(loop: BackgroundLoop) -> None:
    run = Run(loop)
    assert run.train() == [0, 1, 2]
    run.settle()  # the trainer is busy and does not collect
    assert run.sampler.begun == [0, 1, 2, 3, 4, 5]
    assert all(task.done() for task in run.producer._tasks.values())
    assert run.train() == [3, 4, 5]
    run.settle()
    assert run.sampler.begun == list(range(9)), "one batch more per step, never more than one ahead"


@pytest.mark.parametrize(("max_staleness", "minibatches", "batches"), [(1, 1, 2), (3, 1, 4), (2, 2, 2), (5, 2, 3)])
def test_back_pressure_bounds_the_groups_in_flight(
    loop: BackgroundLoop, max_staleness: int, minibatches: int, batches: int
) -> None:
    run = Run(loop, max_staleness=max_staleness, minibatches=minibatches)
    for step in range(4):
        run.train()
        run.settle()
        assert len(run.sampler.begun) == BATCH * (step + batches)


def test_a_straggler_is_overtaken_while_there_is_time_and_then_waited_for(loop: BackgroundLoop) -> None:
    run = Run(loop, max_staleness=2)
    run.hold(0)
    assert run.train() == [1, 2, 3]
    assert run.train() == [4, 5, 6]
    timer = threading.Timer(0.2, run.release, args=(0,))
    timer.start()
    run.settle()
    collected = run.collect()
    assert run.sampler.held[0].is_set(), "the step waited"
    assert sorted({rollout.group_id for rollout in collected.trained}) == [0, 7, 8]
    assert collected.metrics["rollout/dropped_stale"] == 0


def test_a_straggler_that_becomes_too_old_is_dropped_with_its_group_and_counted(loop: BackgroundLoop) -> None:
    run = Run(loop, stragglers="drop")
    run.hold(0)
    assert run.train() == [1, 2, 3]
    assert run.train() == [4, 5, 6]
    run.settle()
    collected = run.collect()
    assert collected.metrics["rollout/dropped_stale"] == GROUP
    assert sorted({rollout.group_id for rollout in collected.rollouts}) == [7, 8, 9]
    run.settle()
    assert run.sampler.cancelled == [0]
    assert 0 not in run.prompts.unfinished


@pytest.mark.parametrize(("released_at", "is_trained"), [(1, True), (2, False)])
def test_a_complete_group_is_as_old_as_its_oldest_token(
    loop: BackgroundLoop, released_at: int, is_trained: bool
) -> None:
    """Begun at version 0, complete and waiting at version 2: its first token is of version 1, or of 0."""
    run = Run(loop, stragglers="drop")
    run.hold(0)
    run.train()
    if is_trained:
        run.producer._tasks[0].cancel()
        run.producer._tasks[0] = loop.run(_begin_again(run))
    run.train()
    run.release(0)
    run.settle()
    time.sleep(0.05)
    collected = run.collect()
    assert (0 in {rollout.group_id for rollout in collected.trained}) == is_trained
    assert collected.metrics["rollout/dropped_stale"] == (0 if is_trained else GROUP)


async def _begin_again(run: Run) -> asyncio.Task:
    """Simulate a first request that reaches the engine only now."""
    producer = run.producer
    return asyncio.get_running_loop().create_task(producer._make(run.sampler, 0, {"n": 0}))  # type: ignore[arg-type]


@pytest.mark.parametrize("stragglers", ["wait", "drop"])
@pytest.mark.parametrize("max_staleness", [1, 2, 4])
def test_for_any_durations_groups_are_whole_trained_once_and_not_too_old(
    loop: BackgroundLoop, max_staleness: int, stragglers: str
) -> None:
    run = Run(loop, max_staleness=max_staleness, stragglers=stragglers)
    chance = random.Random(max_staleness)
    run.sampler.duration = lambda: chance.choice((0.0, 0.001, 0.004, 0.03))
    trained: list[int] = []
    num_dropped = 0
    for _ in range(25):
        version = run.sampler.version
        collected = run.collect()
        oldest = min(call.oldest_version for rollout in collected.trained for call in rollout.calls)
        assert version - oldest <= max_staleness
        ids = [rollout.rollout_id for rollout in collected.trained]
        assert len(ids) == len(set(ids)) == BATCH * GROUP
        assert {i // GROUP * GROUP + j for i in ids for j in range(GROUP)} == set(ids)
        trained += sorted({rollout.group_id for rollout in collected.trained})
        num_dropped += int(collected.metrics["rollout/dropped_stale"]) // GROUP
        assert len(run.producer._works) <= max_staleness * BATCH
        run.sampler.version += 1
        time.sleep(chance.choice((0.0, 0.005)))
    assert len(trained) == len(set(trained))
    assert len(trained) + num_dropped + len(run.prompts.unfinished) == run.prompts.cursor
    assert stragglers == "drop" or num_dropped == 0


def test_an_engine_that_dies_between_steps_ends_the_next_step_with_its_error(
    loop: BackgroundLoop,
) -> None:
    run = Run(loop)
    run.hold(4)
    run.sampler.failing[4] = EngineError("cannot sample: the engine is dead")
    run.train()
    run.release(4)
    run.sampler.held.clear()
    run.settle()
    with pytest.raises(EngineError, match="the engine is dead"):
        run.collect()


def test_after_a_recovery_groups_in_flight_begin_again_and_every_prompt_is_trained_once(loop: BackgroundLoop) -> None:
    run = Run(loop)
    run.hold(4)
    run.sampler.failing[4] = EngineError("cannot sample: the engine is dead")
    trained = run.train()
    run.release(4)
    run.sampler.held.clear()
    run.settle()
    with pytest.raises(EngineError):
        run.collect()
    run.sampler.failing.clear()
    run.producer.forget()
    assert run.producer._works == []
    assert run.prompts.unfinished == (3, 4, 5)
    for _ in range(3):
        trained += run.train()
    assert trained == list(range(12))
    assert run.sampler.num_open == 1


def test_a_failure_is_raised_while_the_step_waits_for_others(loop: BackgroundLoop) -> None:
    run = Run(loop)
    run.hold(0, 1)
    run.sampler.failing[1] = EngineError("cannot sample: the engine is dead")
    timer = threading.Timer(0.1, run.release, args=(1,))
    timer.start()
    run.hold(2, 3, 4, 5)
    with pytest.raises(EngineError, match="the engine is dead"):
        run.collect()
    run.producer.close()
    assert run.sampler.cancelled == [0, 2, 3, 4, 5]


def test_a_resumed_run_begins_untrained_groups_again(loop: BackgroundLoop) -> None:
    run = Run(loop, max_staleness=2)
    run.hold(1)
    trained = [*run.train(), *run.train()]
    run.producer.close()
    assert run.sampler.num_open == 0
    position = run.prompts.position
    cursor, unfinished = position.cursor, position.unfinished
    assert sorted([*trained, *unfinished]) == list(range(cursor))

    resumed = Run(loop, max_staleness=2)
    resumed.prompts.restore(position)
    resumed.sampler.version = run.sampler.version
    for _ in range(4):
        trained += resumed.train()
    assert resumed.sampler.begun[: len(unfinished)] == list(unfinished)
    assert sorted([*trained, *resumed.prompts.unfinished]) == list(range(resumed.prompts.cursor))


def test_groups_beyond_the_last_update_do_not_begin(loop: BackgroundLoop) -> None:
    run = Run(loop, max_staleness=3, updates=2)
    assert run.train() + run.train() == list(range(6))
    assert run.prompts.unfinished == ()
    assert run.prompts.cursor == 6


def odd_prompts_vary(rollout: Rollout) -> float:
    return float(rollout.example["n"] % 2 and rollout.rollout_id % 2)


def test_groups_without_spread_are_replaced(loop: BackgroundLoop) -> None:
    run = Run(loop, reward=odd_prompts_vary, dynamic_sampling=True, max_refills=5)
    collected = run.collect()
    assert {rollout.group_id for rollout in collected.trained} == {1, 3, 5}
    assert collected.metrics["rollout/dropped_filtered"] >= 3 * GROUP
    assert set(run.prompts.unfinished).isdisjoint({0, 2, 4})
    assert len(collected.rollouts) == GROUP * 3 + collected.metrics["rollout/dropped_filtered"]


def visits(run: Run) -> dict[str, str]:
    assert run.prompts.curriculum is not None
    return run.prompts.curriculum.state()


def test_a_curriculum_gets_the_rewards_of_trained_groups_and_of_those_without_spread(loop: BackgroundLoop) -> None:
    run = Run(loop, reward=odd_prompts_vary, dynamic_sampling=True, max_refills=5, weighting="learnability")
    run.collect()
    assert {f"0:{n}" for n in range(6)} <= visits(run).keys(), "groups 1, 3, 5 train; 0, 2, 4 have no spread"
    assert visits(run)["0:0"] == "0 0/2"
    assert visits(run)["0:1"] == "0 1/2"


def test_a_group_without_spread_is_recorded_once_although_its_step_fails(loop: BackgroundLoop) -> None:
    """It is not sampled again after the recovery, so a record lost here would stay lost."""
    reward = lambda rollout: odd_prompts_vary(rollout) if is_restarted else 0.0  # noqa: E731
    is_restarted = False
    run = Run(loop, reward=reward, dynamic_sampling=True, max_refills=10_000, weighting="learnability")
    run.hold(1)
    run.sampler.failing[1] = EngineError("cannot sample: the engine is dead")
    threading.Timer(0.1, run.release, args=(1,)).start()
    with pytest.raises(EngineError):
        run.collect()
    run.producer.forget()
    recorded = visits(run)
    assert recorded["0:0"] == "0 0/2"
    assert 0 not in run.prompts.unfinished
    assert recorded.keys().isdisjoint(f"0:{place}" for place in run.prompts.unfinished)
    assert 1 in run.prompts.unfinished
    is_restarted = True
    run.sampler.failing.clear()
    run.sampler.held.clear()
    run.collect()
    assert visits(run)["0:0"] == "0 0/2"
    assert visits(run)["0:1"] == "0 1/2"


def test_a_resumed_run_continues_with_the_curriculum_and_no_row_is_in_flight_twice(loop: BackgroundLoop) -> None:
    settings = {"max_staleness": 2, "rows": 14, "weighting": "pools", "reward": odd_prompts_vary}
    run = Run(loop, **settings)
    for _ in range(8):
        run.train()
        rows = [row["n"] for row in run.prompts.rows(work.place for work in run.producer._works)]
        assert len(set(rows)) == len(rows)
    run.settle()
    run.producer.close()
    assert run.prompts.position.skipped > (0,)

    resumed = Run(loop, **settings)
    assert resumed.prompts.resume(run.prompts.position, visits(run), run.prompts.sizes) is None
    assert visits(resumed) == visits(run)
    resumed.sampler.version = run.sampler.version
    unfinished = run.prompts.unfinished
    resumed.train()
    assert resumed.sampler.begun[: len(unfinished)] == list(unfinished)


def test_data_without_spread_ends_the_step_at_the_limit_of_refills(loop: BackgroundLoop) -> None:
    run = Run(loop, dynamic_sampling=True, max_refills=2)
    collected = run.collect()
    assert collected.trained == ()
    assert GROUP * BATCH * 3 <= collected.metrics["rollout/dropped_filtered"] <= GROUP * BATCH * 4


def test_the_greedy_answer_belongs_to_its_group(loop: BackgroundLoop) -> None:
    run = Run(loop, reward=lambda rollout: float(rollout.example["n"]), advantage="remax")
    collected = run.collect()
    assert collected.greedy_rewards == {0: 0.0, 1: 1.0, 2: 2.0}
    assert collected.metrics["rollout/greedy_fraction"] == BATCH / (BATCH + BATCH * GROUP)


def test_the_state_of_the_queue_is_measured_and_progress_is_shown(loop: BackgroundLoop) -> None:
    run = Run(loop, stragglers="drop")
    run.hold(4)
    run.train()
    run.settle()
    collected = run.collect()
    assert collected.metrics["rollout/inflight"] + collected.metrics["rollout/queue"] == BATCH * GROUP
    assert collected.metrics["rollout/inflight"] >= GROUP
    assert {rollout.group_id for rollout in run.shown} >= {0, 1, 2, 3, 5}
    assert len({rollout.rollout_id for rollout in run.shown}) >= 2 * BATCH * GROUP - GROUP


def test_the_log_has_what_was_decided(loop: BackgroundLoop) -> None:
    run = Run(loop, stragglers="drop", reward=odd_prompts_vary, dynamic_sampling=True, max_refills=50)
    run.hold(1)
    trained = [run.train() for _ in range(4)]
    run.settle()
    assert [sorted(line.batch) for line in run.log] == trained
    assert [line.begins for line in run.log] == ["start", None, None, None]
    assert [line.version for line in run.log] == [0, 1, 2, 3]
    assert all(line.is_alone for line in run.log)
    rounds = [one for line in run.log for one in line.rounds]
    begun = [place for one in rounds for place in one.begun]
    silent = [place for one in rounds for place in one.silent]
    dropped = [place for one in rounds for place in one.dropped]
    arrived = [place for one in rounds for place, _ in one.arrived]
    assert begun == list(range(len(begun))) == sorted(run.sampler.begun)
    assert silent
    assert all(place % 2 == 0 for place in silent)
    assert dropped[0] == 1
    assert len(set(arrived)) == len(arrived)
    assert set(arrived) >= {place for line in run.log for place in line.delivered}
    assert all(oldest in range(4) for one in rounds for _, oldest in one.arrived)
    run.producer.forget()
    run.train()
    assert run.log[-1].begins == "engine", "an engine was lost"
