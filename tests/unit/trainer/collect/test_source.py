"""Synchronous rollouts: refills, greedy baselines, the same decisions on every rank, repeated steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from lockstep.rewards.batches import BatchReward
from lockstep.rewards.composition import FaultTolerance, Reward, RewardSet, Tally
from lockstep.rewards.shaping import Shaping
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.errors import EngineError
from lockstep.rollout.records import EngineCall, FinishReason, Rollout, RolloutStatus
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.trainer.collect.driving import Drivers
from lockstep.trainer.collect.episodes import Episodes
from lockstep.trainer.collect.groups import Collected, has_spread
from lockstep.trainer.collect.several_ranks import SeveralRanks
from lockstep.trainer.collect.source import Collector
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.data.prompts import Position, Prompts
from lockstep.trainer.stopwatch import Stopwatch
from tests.fixtures.distributed import FakeRank, on_ranks

GROUP = 4


def rollout(rollout_id: int, group_id: int, *, length: int = 3, example: Any = None) -> Rollout:
    call = EngineCall(
        prompt_ids=(1,), sampled_ids=(5,) * length, sampled_logprobs=(-1.0,) * length, finish_reason=FinishReason.STOP
    )
    return Rollout(rollout_id=rollout_id, group_id=group_id, calls=(call,), example=example or {})


class FakeSampler:
    """Sampler without an engine that records its requests."""

    def __init__(self, length: Callable[[int], int] = lambda rollout_id: 3) -> None:
        self.asked: list[dict[str, Any]] = []
        self._length = length

    async def collect(self, examples, *, samples_per_prompt, sampling, step, group_ids, on_rollout=None,
                      on_group=lambda group: None):  # fmt: skip
        self.asked.append({"rows": list(examples), "sampling": sampling, "step": step, "group_ids": group_ids})
        groups = [
            [rollout(g * samples_per_prompt + i, g, example=example,
                     length=self._length(i)) for i in range(samples_per_prompt)]
            for g, example in zip(group_ids, examples, strict=True)
        ]  # fmt: skip
        for group in reversed(groups):  # they end in any order
            on_group(group)
        return [one for group in groups for one in group]

    def take_metrics(self) -> dict[str, float]:
        return {}


class FakeRewards:
    """Rewards by a function; None makes the rollout fail."""

    def __init__(self, reward: Callable[[Rollout], float | None]) -> None:
        self._reward = reward

    compares_batches = False

    def slots(self) -> None: ...

    async def score(self, rollouts: Sequence[Rollout], **_: Any) -> list[Rollout]:
        values = [self._reward(found) for found in rollouts]
        return [
            replace(found, status=RolloutStatus.FAILED) if value is None else replace(found, reward=value)
            for found, value in zip(rollouts, values, strict=True)
        ]

    def refuse_errors(self, tally: Tally | None = None) -> None: ...

    def take_metrics(self) -> dict[str, float]:
        return {}


class FakeLoop:
    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def run(self, coroutine):
        return self._loop.run_until_complete(coroutine)


def config(**algorithm: Any) -> Config:
    made = Config(algorithm=AlgorithmConfig(**algorithm))
    made.rollout.prompts_per_step = 3
    made.rollout.samples_per_prompt = GROUP
    return made


def collector(
    settings: Config,
    sampler: FakeSampler | None,
    reward: Callable[[Rollout], float | None],
    rank: FakeRank | None = None,
    rewards: RewardSet | None = None,
    loop: BackgroundLoop | None = None,
) -> tuple[Collector, Prompts]:
    rows = [{"n": n} for n in range(50)]
    prompts = Prompts([rows], seed=0, shuffle=False, curriculum=settings.data.curriculum)
    drivers = SeveralRanks(loop, rank, (0,)) if rank and loop else Drivers(FakeLoop())  # type: ignore[arg-type]
    episodes = Episodes(drivers=drivers, sampler=sampler, rewards=rewards or FakeRewards(reward))  # type: ignore[arg-type]
    made = Collector(settings, episodes=episodes, sampling=Sampling(max_tokens=8), prompts=prompts)
    return made, prompts


def collect(made: Collector, step: int = 0) -> Collected:
    return made.collect(step, 0, Stopwatch())


def only_odd_prompts_vary(found: Rollout) -> float:
    return float(found.example["n"] % 2 and found.rollout_id % 2)


def test_without_dynamic_sampling_every_group_is_trained() -> None:
    made, prompts = collector(config(), FakeSampler(), only_odd_prompts_vary)
    collected = collect(made)
    assert collected.trained == collected.rollouts
    assert len(collected.rollouts) == 3 * GROUP
    assert prompts.cursor == 3
    assert "rollout/refill_factor" not in collected.metrics


def test_a_curriculum_gets_the_rewards_of_every_group() -> None:
    settings = config()
    settings.data.curriculum.rest_epochs = 1
    made, prompts = collector(settings, FakeSampler(), only_odd_prompts_vary)
    collected = collect(made)
    assert prompts.curriculum is not None
    expected = {"0:0": "2 0/4", "0:1": "0 2/4", "0:2": "2 0/4"}
    assert prompts.curriculum.state() == expected, "two rollouts of row 1 passed, and none of rows 0 and 2"
    assert collected.metrics["data/resting_rows"] == 2


def test_a_failed_step_reports_nothing_to_the_curriculum_and_takes_the_same_rows_again() -> None:
    """With weights, a second report of the same visits would change which rows come next."""
    settings = config(dynamic_sampling=True, max_refills=3)
    settings.data.curriculum.weighting = "learnability"
    whole, expected = collector(settings, FakeSampler(), only_odd_prompts_vary)
    groups = [collect(whole, step).rollouts for step in range(30)]

    made, prompts = collector(settings, DyingSampler(), only_odd_prompts_vary)
    assert prompts.curriculum is not None
    with pytest.raises(EngineError):
        collect(made)
    assert prompts.unfinished
    assert prompts.curriculum.state() == {}
    made.forget()
    assert prompts.position == Position(skipped=(0,))
    assert [collect(made, step).rollouts for step in range(30)] == groups
    assert prompts.position == expected.position
    assert prompts.position.skipped > (0,), "else the curriculum skipped nothing, and nothing is tested"
    assert prompts.unfinished == ()


def test_refills_of_a_step_take_no_row_of_the_step_again() -> None:
    settings = config(dynamic_sampling=True, max_refills=30)
    settings.data.curriculum.weighting = "learnability"
    made, _ = collector(
        settings, FakeSampler(), lambda found: float(found.example["n"] % 25 == 0 and found.rollout_id % 2)
    )
    for step in range(4):
        rows = [found.example["n"] for found in collect(made, step).rollouts]
        assert len(rows) == GROUP * len(set(rows))


def test_groups_with_equal_rewards_are_replaced_by_other_prompts() -> None:
    sampler = FakeSampler()
    made, prompts = collector(config(dynamic_sampling=True, max_refills=5), sampler, only_odd_prompts_vary)
    collected = collect(made)
    assert sorted({found.example["n"] for found in collected.trained}) == [1, 3, 5]
    assert [len(asked["rows"]) for asked in sampler.asked] == [3, 2, 1], "only what is missing is sampled"
    assert prompts.cursor == 6
    assert len({found.rollout_id for found in collected.rollouts}) == 6 * GROUP, "ids are unique over refills"
    assert all(found.rollout_id // GROUP == found.group_id for found in collected.rollouts)
    assert collected.metrics["rollout/refill_factor"] == 2.0
    assert collected.metrics["rollout/dropped_filtered"] == 3 * GROUP
    assert collected.metrics["reward/zero_std_fraction"] == 0.5


def test_at_the_limit_of_refills_the_step_is_smaller() -> None:
    made, prompts = collector(config(dynamic_sampling=True, max_refills=1), FakeSampler(), only_odd_prompts_vary)
    collected = collect(made)
    assert sorted({found.example["n"] for found in collected.trained}) == [1, 3]
    assert prompts.cursor == 5


def test_a_step_in_which_nothing_varies_trains_nothing() -> None:
    made, prompts = collector(config(dynamic_sampling=True, max_refills=2), FakeSampler(), lambda found: 1.0)
    collected = collect(made)
    assert collected.trained == ()
    assert prompts.cursor == 9
    assert collected.metrics["reward/zero_std_fraction"] == 1.0


def test_a_resumed_run_collects_the_same_rollouts() -> None:
    settings = config(dynamic_sampling=True, max_refills=5)
    whole, _ = collector(settings, FakeSampler(), only_odd_prompts_vary)
    collect(whole, 0)
    expected = collect(whole, 1)
    resumed, prompts = collector(settings, FakeSampler(), only_odd_prompts_vary)
    prompts.cursor = 6
    assert [found.example for found in collect(resumed, 1).rollouts] == [found.example for found in expected.rollouts]


def test_a_rank_without_an_engine_follows_the_position_of_rank_0() -> None:
    settings = config(dynamic_sampling=True, max_refills=5)

    settings.data.curriculum.rest_epochs = 1

    def collected(rank: FakeRank) -> tuple[int, Position]:
        sampler = FakeSampler() if rank.is_main else None
        with BackgroundLoop() as loop:
            made, prompts = collector(settings, sampler, only_odd_prompts_vary, rank, loop=loop)
            return sum(len(collect(made, step).rollouts) for step in range(10)), prompts.position

    (num_rollouts, position), other = on_ranks(2, collected)
    assert num_rollouts > 0
    assert other == (0, position)
    assert position.cursor > 50
    assert position.skipped > (0,)


def test_failed_rollouts_do_not_count_as_spread() -> None:
    one, two = replace(rollout(0, 0), reward=1.0), replace(rollout(1, 0), reward=0.0)
    assert has_spread([one, two])
    assert not has_spread([one, replace(two, status=RolloutStatus.FAILED)])


def test_with_turn_rewards_differing_turns_count_as_spread() -> None:
    one, two = rollout(0, 0), rollout(1, 0)
    calls = (*one.calls, *one.calls)
    one = replace(one, calls=calls, reward=1.0, outcome={"turn_rewards": [1.0, 0.0]})
    two = replace(two, calls=calls, reward=1.0, outcome={"turn_rewards": [0.0, 1.0]})
    assert not has_spread([one, two])
    assert has_spread([one, two], by_turn=True)
    assert not has_spread([one, replace(one, outcome={"turn_rewards": [1.0]})], by_turn=True)


def test_remax_samples_one_greedy_answer_per_prompt_and_never_trains_it() -> None:
    sampler = FakeSampler()
    made, _ = collector(config(advantage="remax"), sampler, lambda found: float(found.example["n"]))
    collected = collect(made, 7)
    assert [asked["sampling"].temperature for asked in sampler.asked] == [1.0, 0.0]
    assert sampler.asked[1]["rows"] == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert sampler.asked[1]["group_ids"] == [0, 1, 2]
    assert collected.greedy_rewards == {0: 0.0, 1: 1.0, 2: 2.0}
    assert len(collected.trained) == 3 * GROUP
    assert collected.metrics["rollout/greedy_fraction"] == 3 / (3 + 3 * GROUP)
    assert collected.metrics["rollout/greedy_tokens"] == 9


def test_a_failed_baseline_fails_its_group_and_no_other() -> None:
    def reward(found: Rollout) -> float | None:
        greedy = len(sampler.asked) == 2
        return None if greedy and found.example["n"] == 1 else 1.0

    sampler = FakeSampler()
    made, _ = collector(config(advantage="remax"), sampler, reward)
    collected = collect(made)
    failed = [found for found in collected.rollouts if found.status is RolloutStatus.FAILED]
    assert {found.group_id for found in failed} == {1}
    assert all("no baseline" in (found.error or "") for found in failed)
    assert set(collected.greedy_rewards) == {0, 2}


def test_dynamic_sampling_and_the_metrics_see_the_shaped_reward() -> None:
    settings = config(dynamic_sampling=True)
    shaping = Shaping(horizon=8, overlong_buffer=0.5, overlong_penalty=2.0)
    rewards = RewardSet([Reward(name="one", function=lambda found: 1.0)], shaping=shaping)
    sampler = FakeSampler(length=lambda i: (4, 6, 8, 9)[i])
    made, _ = collector(settings, sampler, lambda found: 1.0, rewards=rewards)
    trained = collect(made).trained
    assert len(trained) == 3 * GROUP
    assert [found.reward for found in trained[:GROUP]] == [1.0, 0.0, -1.0, -1.0]


def test_the_greedy_answer_is_shaped_as_the_rollouts_that_it_is_compared_with() -> None:
    shaping = Shaping(horizon=8, overlong_buffer=0.5)
    rewards = RewardSet([Reward(name="one", function=lambda found: 1.0)], shaping=shaping)
    sampler = FakeSampler(length=lambda i: 6)
    made, _ = collector(config(advantage="remax"), sampler, lambda found: 1.0, rewards=rewards)
    collected = collect(made)
    assert set(collected.greedy_rewards.values()) == {0.5}
    assert {found.reward for found in collected.trained} == {0.5}


def test_a_failed_step_is_sampled_again_from_the_same_rows() -> None:
    made, prompts = collector(config(dynamic_sampling=True, max_refills=3), FakeSampler(), only_odd_prompts_vary)
    expected = collect(made)
    first, cursor = prompts.cursor, 0

    made, prompts = collector(config(dynamic_sampling=True, max_refills=3), DyingSampler(), only_odd_prompts_vary)
    with pytest.raises(EngineError):
        collect(made)
    assert prompts.cursor != cursor, "the test must fail in a refill"
    made.forget()
    assert prompts.cursor == cursor
    assert collect(made).rollouts == expected.rollouts
    made.forget()
    assert prompts.cursor == first, "a completed step is not taken back"


class DyingSampler(FakeSampler):
    """Sampler whose engine dies in the second request."""

    async def collect(self, *arguments: Any, **settings: Any):
        collected = await super().collect(*arguments, **settings)
        if len(self.asked) == 2:
            raise EngineError("the engine is dead")
        return collected


class WaitingSampler(FakeSampler):
    """Ends its first group, and the others once `may_end` is set."""

    def __init__(self, failure: Exception | None = None) -> None:
        super().__init__()
        self.may_end = asyncio.Event()
        self._failure = failure

    async def collect(self, examples, *, on_group, **settings):
        groups: list[list[Rollout]] = []
        await super().collect(examples, on_group=lambda group: groups.insert(0, group), **settings)
        on_group(groups[0])
        async with asyncio.timeout(60):
            await self.may_end.wait()
        if self._failure is not None:
            raise self._failure
        for group in groups[1:]:
            on_group(group)
        return [one for group in groups for one in group]


def reward_set(function: Callable[..., Any], **tolerance: Any) -> RewardSet:
    return RewardSet([Reward(name="own", function=function)], FaultTolerance(**tolerance))


def test_a_group_is_scored_while_others_are_sampled() -> None:
    sampler = WaitingSampler()

    async def judge(found: Rollout) -> float:
        asyncio.get_running_loop().call_soon(sampler.may_end.set)
        return float(found.rollout_id)

    made, _ = collector(config(), sampler, lambda found: 0.0, rewards=reward_set(judge))
    assert [found.reward for found in collect(made).rollouts] == [float(i) for i in range(3 * GROUP)]


def test_a_function_of_the_whole_batch_is_called_once_after_the_last_rollout() -> None:
    sampler, seen = WaitingSampler(), []

    def judge(rollouts: Sequence[Rollout]) -> list[float]:
        seen.append(len(rollouts))
        return [0.0] * len(rollouts)

    rewards = reward_set(BatchReward(function=judge, arguments=lambda rollouts: {"rollouts": rollouts}))
    made, _ = collector(config(), sampler, lambda found: 0.0, rewards=rewards)
    sampler.may_end.set()
    collect(made)
    assert seen == [3 * GROUP]


def test_groups_share_the_limit_of_concurrent_calls() -> None:
    running, most = 0, 0
    two_run = asyncio.Event()

    async def judge(found: Rollout) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 2:
            two_run.set()
        await two_run.wait()
        for _ in range(5):
            await asyncio.sleep(0)
        running -= 1
        return 0.0

    made, _ = collector(config(), FakeSampler(), lambda found: 0.0, rewards=reward_set(judge, concurrency=2))
    collect(made)
    assert most == 2


def test_scoring_ends_with_a_batch_whose_sampling_fails() -> None:
    sampler, ended = WaitingSampler(failure=EngineError("died")), []

    class Scoring(FakeRewards):
        async def score(self, rollouts, **settings):
            sampler.may_end.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)

    made, _ = collector(config(), sampler, lambda found: 0.0, rewards=Scoring(lambda found: 0.0))
    with pytest.raises(EngineError, match="died"):
        collect(made)
    assert ended == [True]
