"""The simulation of benchmarks/scale.py: its clock, its queues, its draws, and a step of one driver."""

from __future__ import annotations

import asyncio
import functools
import math
import statistics
import sys
import threading

import pytest

from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.engine.pool import EnginePool
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.errors import EngineLostError
from tests.fixtures.paths import ROOT
from tests.fixtures.tokenizers import chat_tokenizer

sys.path.insert(0, str(ROOT / "benchmarks"))  # as Python does for a script

from harness import scale_tables
from harness.simulated_engines import CpuMeter, EngineQueue, Lengths, Script, SimulatedEngine, normal
from harness.virtual_clock import VirtualBackgroundLoop, VirtualClock

from benchmarks import scale

BASE_S, PER_REQUEST_S = 0.5, 0.125  # exact in binary


def queue(max_running: int = 100) -> EngineQueue:
    return EngineQueue(base_s=BASE_S, per_request_s=PER_REQUEST_S, max_running=max_running)


def ends(engine: EngineQueue, arrivals: list[tuple[float, int]]) -> list[float]:
    """Return the virtual time at which each request ends. arrivals: (time, tokens)."""

    async def one(at: float, tokens: int) -> float:
        await asyncio.sleep(at)
        await engine.serve(tokens)
        return asyncio.get_running_loop().time()

    async def all_of_them() -> list[float]:
        return await asyncio.gather(*(one(*arrival) for arrival in arrivals))

    with VirtualBackgroundLoop() as loop:
        return loop.run(all_of_them())


@pytest.mark.parametrize("count", [1, 3, 64])
def test_requests_at_once_take_the_time_of_the_formula(count):
    assert ends(queue(), [(0.0, 20)] * count) == pytest.approx([20 * (BASE_S + PER_REQUEST_S * count)] * count)


def test_a_request_slows_another_only_while_both_run():
    alone_s, both_s = BASE_S + PER_REQUEST_S, BASE_S + 2 * PER_REQUEST_S
    # The first has 4 of its 10 tokens when the second arrives, which has 6 of its 8 when the first ends.
    first, second = ends(queue(), [(0.0, 10), (4 * alone_s, 8)])
    assert first == pytest.approx(4 * alone_s + 6 * both_s)
    assert second == pytest.approx(first + 2 * alone_s)


def test_requests_beyond_the_limit_wait_for_a_place():
    step_s = BASE_S + 2 * PER_REQUEST_S
    assert ends(queue(max_running=2), [(0.0, 10)] * 4) == pytest.approx([10 * step_s] * 2 + [20 * step_s] * 2)


def test_the_clock_runs_only_while_a_thread_waits_and_nothing_real_is_awaited():
    clock = VirtualClock()
    assert clock.stands_s() > 0
    with clock.runs():
        assert clock.stands_s() == 0
        with clock.held():
            assert clock.stands_s() > 0
        assert clock.stands_s() == 0
    assert clock.stands_s() > 0


def test_the_clock_waits_for_its_own_rewards_alone():
    end, threads = threading.Event(), []

    def begin_reward() -> None:
        threads.append(threading.Thread(target=end.wait, name="deadline:reward", daemon=True))
        threads[-1].start()

    try:
        begin_reward()
        clock = VirtualClock()
        with clock.runs():
            assert clock.stands_s() == 0
            begin_reward()
            assert clock.stands_s() > 0
    finally:
        end.set()
        for thread in threads:
            thread.join()


def test_a_limit_on_a_wait_passes_in_virtual_time():
    async def begin() -> asyncio.Task:
        return asyncio.create_task(asyncio.sleep(5.0))

    async def has_ended(task: asyncio.Task) -> bool:
        await asyncio.wait([task], timeout=2.0)
        return task.done()

    with VirtualBackgroundLoop() as loop:
        task = loop.run(begin())
        assert [loop.run(has_ended(task)) for _ in range(3)] == [False, False, True]
        assert loop.clock.now == 5.0


def test_the_clock_stands_still_while_something_real_is_awaited():
    async def both() -> tuple[float, float]:
        timer = asyncio.create_task(asyncio.sleep(1000.0))
        begin, release = asyncio.Event(), threading.Event()
        loop_of = asyncio.get_running_loop()

        def answer() -> None:
            release.wait(10.0)
            loop_of.call_soon_threadsafe(begin.set)

        thread = threading.Thread(target=answer)
        with loop.clock.held():
            thread.start()
            release.set()
            await begin.wait()
            during = loop_of.time()
        thread.join()
        await timer
        return during, loop_of.time()

    with VirtualBackgroundLoop() as loop:
        assert loop.run(both()) == (0.0, 1000.0)


def quantile(numbers: list[int], percent: int) -> float:
    return statistics.quantiles(numbers, n=100)[percent - 1]


@functools.cache
def draws(lengths: Lengths, groups: int = 1500, members: int = 4) -> list[list[int]]:
    return [
        [lengths.of(normal(1, group), normal(2, group, member)) for member in range(members)] for group in range(groups)
    ]


@pytest.mark.parametrize(("percent", "expected"), [(50, 29), (90, 56), (99, 85)])
def test_agents_have_as_many_turns_as_published(percent, expected):
    turns = [turn for group in draws(scale.AGENTS) for turn in group]
    assert quantile(turns, percent) == pytest.approx(expected, rel=0.1)


def test_lengths_are_log_normal_and_cut():
    numbers = [length for group in draws(scale.TOKENS) for length in group]
    normal_quantile = statistics.NormalDist(0, scale.TOKENS.sigma).inv_cdf
    for percent in (10, 50, 90):
        expected = scale.TOKENS.median * math.exp(normal_quantile(percent / 100))
        assert quantile(numbers, percent) == pytest.approx(expected, rel=0.1)
    assert max(numbers) == scale.TOKENS.longest
    assert 0.005 < numbers.count(scale.TOKENS.longest) / len(numbers) < 0.02


@pytest.mark.parametrize("alike", [0.0, 0.5])
def test_members_of_a_group_are_alike_as_far_as_is_asked(alike):
    lengths = Lengths(median=1000, sigma=0.5, longest=10**9, alike=alike)
    pairs = [(math.log(group[0]), math.log(group[1])) for group in draws(lengths)]
    assert statistics.correlation(*map(list, zip(*pairs, strict=True))) == pytest.approx(alike, abs=0.05)


def test_an_answer_does_not_depend_on_the_engine_and_survives_its_loss():
    script = Script(words=range(5, 50), vocab_size=64, max_model_len=1000, lengths=scale.TOKENS)
    samplings = [Sampling(max_tokens=500, stop_token_ids=(1,), seed=seed, affinity=(0, seed % 3)) for seed in range(12)]

    def sampled(lose: bool) -> tuple[list[tuple[int, ...]], int]:
        with VirtualBackgroundLoop() as loop:
            engines = [
                SimulatedEngine(i, queue(), script=script, loop=loop, meter=CpuMeter(), server=None, http_every=0)
                for i in range(3)
            ]
            pool = EnginePool(engines)
            pool.on_lost = lambda member, error: None

            async def ask() -> list[tuple[int, ...]]:
                if lose:
                    asyncio.get_running_loop().call_later(1.0, engines[0].lose)
                calls = await asyncio.gather(*(pool.generate([2, 3, 4], sampling) for sampling in samplings))
                return [tuple(call.sampled_ids) for call in calls]

            answers = loop.run(ask())
            if lose:
                with pytest.raises(EngineLostError):
                    loop.run(engines[0].generate([2, 3, 4], samplings[0]))
            return answers, pool.num_resent

    calm, none_sent_again = sampled(lose=False)
    stormy, num_sent_again = sampled(lose=True)
    assert calm == stormy
    assert none_sent_again == 0 < num_sent_again


def test_a_step_of_one_driver_has_its_costs():
    chat = Chat(chat_tokenizer("qwen3"))
    words = chat.tokenizer.encode("the tool says", add_special_tokens=False)
    load = scale.Load(ranks=1, engines=2, rollouts=8, group=4, base_s=0.5, per_request_s=0.1, http_every=0)
    costs = scale.drive(0, load, 0, "", chat, words)
    assert costs["requests"] >= 8
    assert costs["virtual_s"] > 1.0
    row = scale_tables.summary([costs])
    assert row["tokens/CPU s"] * row["µs/token"] == pytest.approx(1e6)
    assert min(row[name] for name in ("prepared calls, CPU s", "end of the step, CPU s")) > 0
    assert row["records, MB"] == row["numbers, MB"] == row["rows, MB"] == 0.0  # no other rank gets them


def test_the_outlook_grows_with_the_tokens_of_all_gpus_but_for_what_a_rank_has_alone():
    def costs(ranks: int) -> dict[str, float]:
        """Return costs of ranks with 1,000 tokens each: 2 µs for each token of a rank, and 3 for each of all."""
        per_token = 2 + 3 * ranks
        return {
            "ranks": ranks,
            "tokens": 1000 * ranks,
            "rows, MB": 0.02,
            "numbers, MB": 0.005 * ranks,
            "rows, CPU s": 1e-3 * per_token,
            "rows, median": 1e-3,
            "prepared calls, CPU s": 4e-4,
            "end of the step, CPU s": 5e-4 * ranks,
            "over all tokens, CPU s": 1e-4 * ranks,
        }

    meetings = [{"busiest rank": 2.0}, {"busiest rank": 1.0}]
    unit = {"record_bytes_per_token": 10.0, "unpacking_us_per_token": 0.5}
    measured = {"ranks": [costs(ranks) for ranks in (1, 2, 4, 8)], "http": [{"µs/token": 20.0}], "meetings": meetings}
    outlook = scale_tables.outlook(measured, unit)
    assert [row["GPUs"] for row in outlook] == list(scale_tables.GPUS)
    thousands = scale_tables.GPU_TOKENS / 1000
    for row in outlook:
        gpus = row["GPUs"]
        assert row["rows to each rank, MB"] == pytest.approx(0.02 * thousands)
        assert row["numbers to each rank, MB"] == pytest.approx(0.005 * thousands * gpus)
        assert row["rows, CPU s of rank 0"] == pytest.approx(1e-3 * (2 + 3 * gpus) * thousands)
        assert row["rows, CPU s of others"] == pytest.approx(1e-3 * thousands)
        assert row["rows from rank 0 at 25 Gb/s, s"] == pytest.approx(0.02 * thousands * (gpus - 1) / 3125)
        assert row["driving, CPU s per rank"] == pytest.approx(20e-6 * scale_tables.GPU_TOKENS)
        assert row["meetings, CPU s of the busiest rank"] == pytest.approx(2e-3 * 120 / scale_tables.POLL_S)
        waits = [row[name] for name in row if name.endswith("at 25 Gb/s, s")]
        waits += [row["rows, CPU s of rank 0"], row["over all tokens, CPU s of each rank"]]
        assert row["prepared calls, CPU s per rank"] == pytest.approx(4e-4 * thousands)
        waits.append(row["checks and files, CPU s of rank 0"])
        assert waits[-1] == pytest.approx(5e-4 * gpus * thousands)
        assert row["share of the step in which GPUs wait"] == pytest.approx(sum(waits) / scale_tables.GPU_STEP_S)


def test_a_constant_whose_measurements_fall_stays_what_they_are_on_average():
    rows = [{"ranks": ranks, "tokens": 100 * ranks, "value": value} for ranks, value in ((2, 3.0), (4, 2.0), (8, 1.0))]
    assert scale_tables.of_step(rows, "value", 1024) == pytest.approx(2.0 / 100 * scale_tables.GPU_TOKENS)
