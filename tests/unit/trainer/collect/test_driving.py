"""Drivers: whatever their number, the same records, order, metrics and errors."""

from __future__ import annotations

import asyncio
import pickle
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from lockstep.rewards import meter
from lockstep.rewards.batches import BatchReward, Scope
from lockstep.rewards.composition import FaultTolerance, Reward, RewardSet
from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.environments.single_turn import SingleTurn
from lockstep.rollout.errors import EngineError, EvidenceError, RequestError, RewardError
from lockstep.rollout.records import DataRow, EngineCall, FinishReason, ImageSpan, Rollout, VersionSpan
from lockstep.rollout.sampler.sampler import Sampler
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.trainer.collect.async_source import Producer
from lockstep.trainer.collect.driving import Drivers
from lockstep.trainer.collect.episodes import Episodes
from lockstep.trainer.collect.several_ranks import SeveralRanks, pack
from lockstep.trainer.collect.source import Collector
from lockstep.trainer.config.schema import Config
from lockstep.trainer.data.prompts import Prompts
from lockstep.trainer.evaluate.evaluator import Evaluator
from lockstep.trainer.stopwatch import Stopwatch
from tests.fixtures.distributed import FakeRank, on_ranks
from tests.fixtures.gateway import ScriptedEngine
from tests.fixtures.tokenizers import chat_tokenizer

BATCH, GROUP, STEPS = 5, 3, 4
TOLERANT = FaultTolerance(max_error_rate=1.0)
FORMS = [(1, (0,)), (2, (0,)), (2, (0, 1)), (3, (0, 1, 2)), (3, (0, 2))]
"""Number of ranks, and those that drive."""


class Engine(ScriptedEngine):
    """Samples what the seed says, after a time that nothing says."""

    def __init__(self, rank: int, failing: Callable[[int], Exception | None] = lambda seed: None) -> None:
        super().__init__(script=lambda ids, sampling: [5 + (sampling.seed or 0) % 97] * (1 + (sampling.seed or 0) % 7))
        self._chance, self._failing = random.Random(rank), failing
        self.num_waiting = self.num_requests = 0
        self.version = 0

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, images: Sequence[ImageSpan] = ()
    ) -> EngineCall:
        self.num_waiting += 1
        self.num_requests += 1
        try:
            await asyncio.sleep(self._chance.random() * 0.01)
            if failure := self._failing(sampling.seed or 0):
                raise failure
        finally:
            self.num_waiting -= 1
        call = await super().generate(prompt_ids, sampling)
        return replace(call, version_spans=(VersionSpan(version=self.version, start=0, end=len(call.sampled_ids)),))


def number_of(rollout: Rollout) -> int:
    return sum(call.sampled_ids[0] for call in rollout.calls)


def own(rollout: Rollout) -> float:
    """Reward two thirds of the prompts alike, and fail for some rollouts."""
    meter.add("calls", 1)
    meter.average("length", float(rollout.num_sampled))
    if number_of(rollout) % 11 == 0:
        raise ValueError("eleven")
    return float(rollout.example["n"] % 3 == 0 and number_of(rollout) % 2)


def ranked(rollouts: Sequence[Rollout]) -> list[float]:
    """Reward the place among all rollouts that are seen together."""
    numbers = [number_of(rollout) for rollout in rollouts]
    return [sorted(numbers).index(number) / len(numbers) for number in numbers]


def compared(scope: Scope) -> Reward:
    function = BatchReward(function=ranked, arguments=lambda rollouts: {"rollouts": rollouts}, scope=scope)
    return Reward(name="ranked", function=function)


class Rank:
    """The parts of one rank."""

    def __init__(
        self,
        rank: FakeRank,
        loop: BackgroundLoop,
        drivers: tuple[int, ...],
        *,
        rewards: Sequence[Reward] = (),
        tolerance: FaultTolerance | None = None,
        failing: Callable[[int], Exception | None] = lambda seed: None,
        max_staleness: int = 0,
        resting: bool = False,
        **algorithm: Any,
    ) -> None:
        self.config = Config(updates=1000)
        self.config.rollout.prompts_per_step, self.config.rollout.samples_per_prompt = BATCH, GROUP
        self.config.rollout.max_staleness = max_staleness
        self.config.data.curriculum.rest_epochs = int(resting)
        for name, value in algorithm.items():
            setattr(self.config.algorithm, name, value)
        self.is_served = True
        """False: all engines of this rank are lost."""
        self.engine = Engine(rank.rank, failing)
        sampler = Sampler(
            engine=self.engine, chat=Chat(chat_tokenizer("qwen3")), make_environment=SingleTurn, max_turns=1, seed=7
        )
        rows = [DataRow({"prompt": f"row {n}", "n": n}) for n in range(40)]
        for number, row in enumerate(rows):
            row.place = f"row {number} of rows.jsonl"
        self.prompts = Prompts([rows], seed=0, shuffle=True, curriculum=self.config.data.curriculum)
        self.episodes = Episodes(
            drivers=SeveralRanks(loop, rank, drivers) if rank.world_size > 1 else Drivers(loop),
            sampler=sampler if rank.rank in drivers else None,
            rewards=RewardSet(list(rewards) or [Reward(name="own", function=own)], tolerance or TOLERANT),
        )
        self.episodes.drivers.has_engine = lambda: self.is_served
        make: Any = partial(Producer, log=[]) if max_staleness else Collector
        self.source = make(self.config, episodes=self.episodes, sampling=Sampling(max_tokens=8), prompts=self.prompts)
        self.shown: list[int] = []

    def collect(self, step: int) -> Any:
        return self.source.collect(step, step, Stopwatch(), lambda rollout: self.shown.append(rollout.rollout_id))


def alike(rollouts: Iterable[Rollout]) -> list[Rollout]:
    """The rollouts without their times."""
    return [replace(rollout, duration_s=0.0) for rollout in rollouts]


def in_form(form: tuple[int, tuple[int, ...]], work: Callable[[Rank], Any], **settings: Any) -> list[Any]:
    """Run `work` with these drivers; return the results of all ranks."""
    world_size, drivers = form

    def on_rank(rank: FakeRank) -> Any:
        with BackgroundLoop() as loop:
            return work(Rank(rank, loop, drivers, **settings))

    return on_ranks(world_size, on_rank) if world_size > 1 else [on_rank(FakeRank())]


def steps(rank: Rank) -> list[Any]:
    """Return everything that a run does with the rollouts of a few steps."""
    found = []
    for step in range(STEPS):
        rank.shown.clear()
        one = rank.collect(step)
        state = rank.prompts.curriculum
        metrics = {
            name: pytest.approx(value, rel=1e-12) if name.startswith("judge/") else value
            for name, value in one.metrics.items()
        }
        found.append(
            [
                alike(one.rollouts), alike(one.trained), one.greedy_rewards, metrics, rank.prompts.position,
                state and state.state(), sorted(rank.shown),
            ]
        )  # fmt: skip
    return found


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "refills": {"dynamic_sampling": True, "max_refills": 4},
    "curriculum": {"dynamic_sampling": True, "max_refills": 4, "resting": True},
    "greedy": {"advantage": "remax", "dynamic_sampling": True, "max_refills": 4},
    "groups": {"rewards": [compared(Scope.GROUP), Reward(name="own", function=own)]},
    "batch": {"rewards": [compared(Scope.BATCH), Reward(name="own", function=own)]},
    "batch with refills": {"rewards": [compared(Scope.BATCH)], "dynamic_sampling": True, "max_refills": 2},
}


@pytest.mark.parametrize("case", CASES)
def test_records_order_and_metrics_do_not_depend_on_the_number_of_drivers(case: str) -> None:
    expected = in_form(FORMS[0], steps, **CASES[case])[0]
    rollouts = [rollout for step in expected for rollout in step[0]]
    assert len({number_of(rollout) for rollout in rollouts}) > BATCH * GROUP, "else nothing is compared"
    assert all(type(rollout.example) is DataRow and rollout.example.place for rollout in rollouts)
    if "own" in expected[0][3]:
        assert sum(step[3]["reward/errors/exception"] for step in expected) > 0
    for form in FORMS[1:]:
        main, *others = in_form(form, steps, **CASES[case])
        assert main == expected, form
        for other in others:
            assert [step[0] for step in other] == [[]] * STEPS
            assert [step[4] for step in other] == [step[4] for step in expected], "the position is that of rank 0"


def test_groups_of_a_driver_without_engines_are_sampled_by_the_others() -> None:
    expected = in_form(FORMS[0], steps)[0]

    def struck(rank: Rank) -> list[Any]:
        collect, number = rank.source.collect, rank.episodes.drivers.index

        def with_losses(step: int, *arguments: Any) -> Any:
            rank.is_served = number != (None, 1, 0, 2)[step]  # another driver in each step, and none in the first
            before = rank.engine.num_requests
            one = collect(step, *arguments)
            assert rank.is_served == (rank.engine.num_requests > before)
            return one

        rank.source.collect = with_losses  # type: ignore[method-assign]
        return steps(rank)

    assert in_form((3, (0, 1, 2)), struck)[0] == expected


def test_rank_0_sees_every_rollout_of_the_step_arrive() -> None:
    for form in FORMS:
        shown = in_form(form, lambda rank: (rank.collect(0), sorted(rank.shown))[1])
        assert shown == [list(range(BATCH * GROUP)), *[[]] * (form[0] - 1)]


def test_a_function_of_the_whole_batch_is_called_once_by_rank_0() -> None:
    sizes: list[int] = []

    def counted(rollouts: Sequence[Rollout]) -> list[float]:
        sizes.append(len(rollouts))
        return ranked(rollouts)

    reward = BatchReward(function=counted, arguments=lambda rollouts: {"rollouts": rollouts})
    in_form((3, (0, 1, 2)), lambda rank: rank.collect(0), rewards=[Reward(name="counted", function=reward)])
    assert sizes == [BATCH * GROUP]


def test_faults_of_all_engines_are_counted_together() -> None:
    failing = lambda seed: RequestError("a fault") if seed % 5 == 0 else None  # noqa: E731
    names = ("rollout/reissued", "rollout/groups_lost_to_engine")

    def counts(rank: Rank) -> list[float]:
        metrics = rank.collect(0).metrics
        return [metrics[name] for name in names if name in metrics]

    expected = in_form(FORMS[0], counts, failing=failing)[0]
    assert min(expected) > 0
    for form in FORMS[1:]:
        assert in_form(form, counts, failing=failing)[0] == expected


def test_the_share_of_errors_is_that_of_all_drivers() -> None:
    """The second driver has the groups 1 and 3 of five: its own share is beyond the limit, that of all is not."""

    def fails(rollout: Rollout) -> float:
        if rollout.group_id in (1, 3):
            raise ValueError("broken")
        return 0.0

    settings: dict[str, Any] = {"rewards": [Reward(name="fails", function=fails)]}
    for form in FORMS:
        for limit, is_refused in ((0.5, False), (0.3, True)):
            tolerance = FaultTolerance(max_error_rate=limit)
            if not is_refused:
                in_form(form, lambda rank: rank.collect(0), tolerance=tolerance, **settings)
                continue
            with pytest.raises(RewardError, match="6 of 15 reward calls failed"):
                in_form(form, lambda rank: rank.collect(0), tolerance=tolerance, **settings)


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_an_error_of_one_driver_is_raised_on_all_and_the_others_stop(max_staleness: int) -> None:
    """The engines of the other drivers would never answer."""

    def work(rank: Rank) -> Any:
        if rank.episodes.drivers.index == 1:
            rank.engine._failing = lambda seed: EngineError("the engine of rank 1 is dead")
        elif rank.episodes.sampler is not None:
            rank.engine._chance = Endless()
        with pytest.raises(EngineError) as raised:
            rank.collect(0)
        rank.source.forget()
        assert rank.engine.num_waiting == 0
        rank.engine._failing, rank.engine._chance = lambda seed: None, random.Random(0)
        one = rank.collect(0)
        rank.source.close()
        return str(raised.value), alike(one.rollouts)

    expected = in_form(FORMS[0], lambda rank: (alike(rank.collect(0).rollouts), rank.source.close())[0])[0]
    for form in ((2, (0, 1)), (3, (0, 1, 2)), (3, (0, 2))):
        found = in_form(form, work, max_staleness=max_staleness)
        assert {text for text, _ in found} == {"the engine of rank 1 is dead"}
        if not max_staleness:
            assert found[0][1] == expected, "the step is repeated with the same rows and seeds"


class Endless(random.Random):
    def random(self) -> float:
        return 1e9


def test_scoring_that_fails_on_one_driver_ends_the_scoring_of_the_others() -> None:
    ended: list[int] = []

    def work(rank: Rank) -> str:
        with pytest.raises(RewardError) as raised:
            rank.collect(0)
        return str(raised.value)

    async def judge(rollout: Rollout) -> float:
        if rollout.group_id == 1:
            raise ValueError("broken")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(rollout.group_id)
        return 0.0

    tolerance = FaultTolerance(on_error={"exception": "raise"}, timeout_s=600, concurrency=100)  # type: ignore[dict-item]
    texts = in_form((3, (0, 1, 2)), work, rewards=[Reward(name="judge", function=judge)], tolerance=tolerance)
    assert len(set(texts)) == 1
    assert "broken" in texts[0]
    assert {0, 2} <= set(ended)


def test_ranks_that_fail_at_once_with_different_errors_raise_the_same_one() -> None:
    """Else one would try to recover an engine while the other ends."""

    def work(rank: FakeRank) -> str:
        def fails() -> None:
            raise RewardError("no reward") if rank.is_main else EngineError("no engine")

        with pytest.raises(RewardError) as raised:
            SeveralRanks(None, rank, (0, 1)).together(fails)  # type: ignore[arg-type]
        return str(raised.value)

    assert on_ranks(2, work) == ["no reward"] * 2


def test_asynchronous_groups_have_the_same_records_and_are_trained_once() -> None:
    def run(rank: Rank) -> tuple[dict[int, list[Rollout]], float, list[int], tuple[int, ...]]:
        groups: dict[int, list[Rollout]] = {}
        order: list[int] = []
        calls = 0.0
        for step in range(2 * STEPS):
            rank.engine.version = step
            one = rank.collect(step)
            calls += one.metrics.get("judge/own/calls", 0.0)
            for rollout in alike(one.rollouts):
                made = replace(rollout, calls=tuple(replace(call, version_spans=()) for call in rollout.calls))
                groups.setdefault(rollout.group_id, []).append(made)
            order += sorted({rollout.group_id for rollout in one.rollouts})
        rank.source.close()
        return groups, calls, order, rank.prompts.unfinished

    expected: dict[int, list[Rollout]] = {}
    for form in FORMS:
        main, *others = in_form(form, run, max_staleness=1, advantage="remax")
        groups, calls, order, unfinished = main
        assert len(order) == len(set(order)) == 2 * STEPS * BATCH
        assert sorted([*order, *unfinished]) == list(range(len(order) + len(unfinished)))
        assert calls >= len(order) * GROUP
        assert all(groups[place] == expected.setdefault(place, groups[place]) for place in groups)
        assert all(other[0] == {} for other in others)


def test_an_evaluation_is_the_same_with_any_drivers() -> None:
    def evaluated(rank: Rank) -> Any:
        rank.config.eval.samples_per_prompt = 2
        data = {"": rank.prompts.sets[0], "other": rank.prompts.sets[0][:7]}
        sampling = Sampling(max_tokens=8)
        evaluator = Evaluator(rank.config.eval, data, episodes=rank.episodes, sampling=sampling)
        evaluation = evaluator.evaluate(lambda rollout: rank.shown.append(rollout.rollout_id))
        assert rank.episodes.rewards.take_metrics().keys() == RewardSet([compared(Scope.GROUP)]).take_metrics().keys()
        return alike(evaluation.rollouts), evaluation.metrics, len(rank.shown)

    expected = in_form(FORMS[0], evaluated)[0]
    assert len(expected[0]) == expected[2] == 2 * (40 + 7)
    for form in FORMS[1:]:
        main, *others = in_form(form, evaluated)
        assert main == expected
        assert others == [([], {}, 0)] * len(others)


def test_errors_of_an_evaluation_are_those_of_all_drivers() -> None:
    def evaluate(rank: Rank) -> None:
        rank.config.eval.samples_per_prompt = 2
        data = {"": rank.prompts.sets[0][:5]}
        Evaluator(rank.config.eval, data, episodes=rank.episodes, sampling=Sampling(max_tokens=8)).evaluate()  # type: ignore[arg-type]

    def fails(rollout: Rollout) -> float:
        if rollout.group_id in (1, 3):
            raise ValueError("broken")
        return 0.0

    rewards = [Reward(name="fails", function=fails)]
    for form in FORMS:
        in_form(form, evaluate, rewards=rewards, tolerance=FaultTolerance(max_error_rate=0.5))
        with pytest.raises(RewardError, match="4 of 10 reward calls failed"):
            in_form(form, evaluate, rewards=rewards, tolerance=FaultTolerance(max_error_rate=0.3))


def test_records_keep_what_calls_share_over_many_turns() -> None:
    calls: list[EngineCall] = []
    ids: tuple[int, ...] = (1,)
    for turn in range(600):
        spans = (VersionSpan(version=3, start=0, end=1),)
        sampled = {"sampled_ids": (turn + 5,), "sampled_logprobs": (-0.1 * turn,), "finish_reason": FinishReason.STOP}
        calls.append(EngineCall(prompt_ids=ids, version_spans=spans, **sampled))
        ids = (*ids, turn + 5, 2)
    rollout = Rollout(rollout_id=3, group_id=1, calls=tuple(calls), example={"n": 1}, outcome={"places": (1, 2)})
    payload = pack([[rollout]])
    ((copied,),) = pickle.loads(payload)  # noqa: S301
    assert copied == rollout
    assert copied.calls[-1].prompt.base is copied.calls[-2]
    assert len(payload) < 1000 * len(calls), "whole prompts would be megabytes"


def test_what_cannot_be_sent_is_an_error_that_says_what_to_return() -> None:
    rollout = Rollout(rollout_id=0, group_id=0, calls=(), outcome={"made": lambda: 1})
    with pytest.raises(EvidenceError, match=r"cannot be sent to rank 0: .*expected plain values"):
        pack([rollout])
