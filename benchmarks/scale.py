"""Cost of the drivers against up to 1,024 simulated engines: CPU per token, bytes per rank, the exchange of a step.

    python benchmarks/scale.py [--only engines drivers ranks ...] [--base-ms 4.5 --per-request-ms 0.19]
    python benchmarks/scale.py --fit          # the two numbers, of a real vLLM server with the demo's model

Each rank is a process that drives its share of the episodes, as ranks of a run do. Real are the sampler, the chat
template, records, rewards, the pool of engines, the meetings of the ranks over gloo, the rows of the step, their
assignment to ranks and their way there, and what every rank computes over all tokens (advantages, correction weights,
metrics); of 16 requests one goes over HTTP to a scripted server. The engines are simulated
(`harness/simulated_engines.py`): a step takes `base + per request x running`, turns and their tokens are log-normal and
alike within groups, and one engine in a hundred is lost at a drawn time. Their time passes on a virtual clock.

All times are CPU times of the ranks' processes, without the simulation's own. Sweeps:

engines   one driver, two rollouts per engine
drivers   the largest load of that sweep, shared by 1, 2 and 4 drivers; the goal is 3 times the rate with 4
ranks     the load per rank is constant; the goal is an exponent of 0.1 at most
apart     the load of a rank in as many processes that share nothing: what the machine's cores and caches add
meetings  the ranks meet with nothing to tell, as they do every 0.2 s while episodes run
http      no request over HTTP, and all
turns     short episodes, and as long as those of agents (median 29 turns, 90th percentile 56, 99th 85)

An exponent k is that of value ∝ size^k; 1 is linear.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import random
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from aiohttp import web
from harness.random_reward import __file__ as reward_file
from harness.ranks import place
from harness.real_server import ENVIRONMENT, server
from harness.results import argument_parser, report, table
from harness.scale_tables import exponents, outlook, summary
from harness.simulated_engines import (
    CpuMeter,
    EngineQueue,
    Lengths,
    Script,
    SimulatedEngine,
    SimulatedTask,
    scripted_server,
)
from harness.virtual_clock import VirtualBackgroundLoop
from harness.workloads import WORKLOADS
from torch.distributed.elastic.utils.distributed import get_free_port

from lockstep.rewards.composition import make_reward_set
from lockstep.rewards.workers.pool import Isolation
from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.engine.pool import EnginePool
from lockstep.rollout.engine.protocol import PooledEngine, Sampling
from lockstep.rollout.episode.prepared_calls import prepared
from lockstep.rollout.records import Rollout
from lockstep.rollout.rollout_lines import calls_as_json, write_rollouts
from lockstep.rollout.sampler.sampler import Sampler
from lockstep.rollout.server.server_engine import ServerEngine
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.rollout.system.gc_freeze import gc_frozen
from lockstep.trainer.batch.assignment import Plan
from lockstep.trainer.batch.dealt_batch import dealt
from lockstep.trainer.batch.prefix_bundles import plan_bundles
from lockstep.trainer.batch.prefixes import token_keys
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.collect.driving import Drivers
from lockstep.trainer.collect.episodes import Episodes
from lockstep.trainer.collect.several_ranks import Meeting, SeveralRanks, pack
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.config.groups.correction_settings import CorrectionConfig
from lockstep.trainer.credit.correction import StepCorrection
from lockstep.trainer.credit.old_policy import FromUpdate
from lockstep.trainer.credit.targets import Logprobs, rollout_targets
from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.objective.correction.mismatch import mismatch_metrics
from lockstep.trainer.observe.step_metrics import token_metrics

SWEEPS = ("engines", "drivers", "ranks", "apart", "meetings", "http", "turns")
SHORT = Lengths(median=3, sigma=0.5, longest=8)
AGENTS = Lengths(median=29, sigma=0.49, longest=200)
"""Turns of episodes."""
TOKENS = Lengths(median=64, sigma=0.9, longest=512)
"""Tokens of a turn."""
ANSWER = "the tool says " * 8
"""Text with which the environment answers a turn."""
MAX_MODEL_LEN = 2**17
PACK_TOKENS = 16384
MAX_RUNNING = 256
LOST_SHARE = 0.01
BASE_MS, PER_REQUEST_MS = 4.5, 0.19
"""Step of an engine, by `--fit` [ms]."""
WARM_UP_GROUPS = 2
"""Groups of each rank before the measurement, which import and connect what is used."""
MEETINGS, POOL_REQUESTS = 100, 500
T = TypeVar("T")
FIT_TOKENS, FIT_REQUESTS, FIT_ROUNDS = 64, (1, 2, 4, 8, 16, 32, 64), 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One point of a sweep."""

    ranks: int
    """Each is a driver."""
    engines: int
    """Number of the engines of all drivers together."""
    rollouts: int
    base_s: float
    """Time of an engine's step without requests, and what each running request adds [s]."""
    per_request_s: float
    group: int = 8
    turns: Lengths = SHORT
    tokens: Lengths = TOKENS
    http_every: int = 16
    """One of this number of requests goes over HTTP; 0: none."""
    lost_share: float = LOST_SHARE

    @property
    def num_groups(self) -> int:
        return self.rollouts // self.group

    @property
    def typical_s(self) -> float:
        """Rough time of an episode, in which engines are lost [s]."""
        running = self.rollouts / self.engines
        return self.turns.median * self.tokens.median * (self.base_s + self.per_request_s * running)


class CountingRank(Distributed):
    """A rank that counts the bytes that reach it: in broadcasts, and from one rank alone."""

    broadcast_size, sent_size = 0, 0

    def broadcast_bytes(self, payload: bytes) -> bytes:
        received = super().broadcast_bytes(payload)
        self.broadcast_size += len(received)
        return received

    def receive(self, tensor: torch.Tensor, rank: int) -> Callable[[], object]:
        self.sent_size += tensor.nbytes
        return super().receive(tensor, rank)


class CountingDrivers(SeveralRanks):
    """Drivers that list the bytes of records that reach rank 0, in each meeting."""

    def __init__(self, loop: BackgroundLoop, ranks: Distributed, arrived: list[int]) -> None:
        super().__init__(loop, ranks, range(ranks.world_size))
        self._arrived = arrived

    def meet(self, *arguments: Any) -> Meeting:
        meeting = super().meet(*arguments)
        self._arrived.append(sum(map(len, meeting.payloads)))
        return meeting


class Stopwatch:
    """CPU time of this process, all threads, without the simulation's own."""

    def __init__(self, meter: CpuMeter) -> None:
        self._meter = meter
        self._before = self._now()

    def _now(self) -> float:
        return time.process_time() - self._meter.seconds

    def lap(self) -> float:
        """Return the seconds since the last call."""
        before, self._before = self._before, self._now()
        return self._before - before


def join(rank: int, ranks: int, port: int) -> CountingRank:
    """Start this process as one of several ranks of this machine."""
    torch.set_num_threads(1)
    if ranks > 1:
        sizes = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "ACCELERATE_USE_CPU": "true"}
        os.environ |= {**sizes, **place(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return CountingRank.start(dtype="float32", max_grad_norm=0.0)


def meet(rank: int, ranks: int, port: int) -> dict[str, float]:
    """Return the CPU time of a meeting in which there is nothing to tell."""
    with join(rank, ranks, port) as me, BackgroundLoop() as loop:
        drivers = SeveralRanks(loop, me, range(ranks))
        for count in (20, MEETINGS):  # the first ones connect
            me.barrier()
            start = time.process_time(), time.perf_counter()
            for _ in range(count):
                drivers.meet(list)
            costs = time.process_time() - start[0], time.perf_counter() - start[1]
    return {"cpu_s": costs[0] / MEETINGS, "elapsed_s": costs[1] / MEETINGS}


def drive(rank: int, load: Load, port: int, url: str, chat: Chat, words: Sequence[int]) -> dict[str, float]:
    """Make one step as one rank; return what it cost."""
    vocab_size = max(max(words), *chat.stop_token_ids) + 1
    script = Script(words=words, vocab_size=vocab_size, max_model_len=MAX_MODEL_LEN, lengths=load.tokens)
    rewards = make_reward_set([f"{reward_file}:odd_length"], isolation=Isolation(mode="thread"))
    meter = CpuMeter()
    with join(rank, load.ranks, port) as ranks, VirtualBackgroundLoop() as loop:
        server = (
            ServerEngine(url, loop=SimpleNamespace(run=loop.run_real), vocab_size=vocab_size)
            if load.http_every
            else None
        )
        engines = [
            SimulatedEngine(
                number,
                EngineQueue(base_s=load.base_s, per_request_s=load.per_request_s, max_running=MAX_RUNNING, meter=meter),
                script=script,
                loop=loop,
                meter=meter,
                server=server,
                http_every=load.http_every,
            )
            for number in range(rank, load.engines, load.ranks)
        ]
        preparing = CpuMeter()

        def metered(rollout: Rollout) -> Rollout:
            with preparing.counted():
                return prepared(rollout, calls_as_json)

        pool = EnginePool(engines)
        pool.on_lost = lambda member, error: None  # it stays away until the next push
        sampler = Sampler(
            engine=pool,
            chat=chat,
            make_environment=lambda: SimulatedTask(load.turns),
            max_turns=load.turns.longest,
            seed=0,
            prepare=metered,
        )
        record_bytes: list[int] = []
        drivers = CountingDrivers(loop, ranks, record_bytes) if load.ranks > 1 else Drivers(loop)
        episodes = Episodes(drivers=drivers, sampler=sampler, rewards=rewards)
        sampling = Sampling(max_tokens=load.tokens.longest, stop_token_ids=chat.stop_token_ids)

        def rollouts(count: int, step: int) -> list[Any]:
            groups = episodes.groups(
                range(count),
                lambda places: [{"prompt": f"question {place}", "answer": ANSWER, "place": place} for place in places],
                samples_per_prompt=load.group,
                sampling=sampling,
                step=step,
                stage=lambda name: nullcontext(),
            )
            return [rollout for group in groups for rollout in group]

        def share(rollouts: list[Any]) -> StepBatch:
            """As `Trainer._share`, and the first pass of a step."""
            batch = ranks.together(lambda: StepBatch.of(rollouts, mask_truncated=False))
            batch = dealt(batch, ranks)

            def assign() -> Plan:
                with planning.counted():
                    keys = [token_keys(row, with_routes=True) for row in batch.rows]
                    return plan_bundles(keys, num_ranks=load.ranks, token_budget=PACK_TOKENS)

            planning = CpuMeter()
            batch.share(assign, ranks)
            planned.append(planning.seconds)
            return batch

        planned: list[float] = []

        async def thread_s() -> float:
            """Return the CPU time of the episodes: of their thread, without the simulation's own."""
            return time.thread_time() - meter.seconds

        with gc_frozen():
            share(rollouts(WARM_UP_GROUPS * load.ranks, step=0))
            lost = random.Random(rank).sample(engines, round(load.lost_share * len(engines)))

            async def lose_some() -> None:
                for index, engine in enumerate(lost):
                    later = load.typical_s * (index + 1) / (len(lost) + 1)
                    asyncio.get_running_loop().call_later(later, engine.lose)

            loop.run_real(lose_some())
            begun_at = loop.clock.now
            requests_before = sum(engine.num_requests for engine in engines)
            record_bytes.clear()
            preparing.seconds = 0.0
            watch, thread_before_s = Stopwatch(meter), loop.run_real(thread_s())
            delivered = rollouts(load.num_groups, step=1)
            thread_after_s, driving_s = loop.run_real(thread_s()), watch.lap()
            virtual_s, arrived = loop.clock.now - begun_at, list(record_bytes)
            ranks.broadcast_size = ranks.sent_size = 0  # decisions
            watch.lap()
            batch = share(delivered)
            sharing_s = watch.lap()
            compute_over_all_tokens(batch, ranks)
            computing_s = watch.lap()
            end_step(delivered, batch)
            ending_s = watch.lap()
            payload = pack(delivered)
            packing_s = watch.lap()
            pickle.loads(payload)  # noqa: S301  # of this process
            unpacking_s = watch.lap()
            pool_us = 1e6 * loop.run_real(pool_s(pool))
        if failed := [rollout.error for rollout in delivered if not rollout.is_trainable]:
            raise RuntimeError(f"{len(failed)} of {load.rollouts} rollouts failed: {failed[0]}")
        if server is not None:
            loop.run_real(server.close())
    return {
        "engines": load.engines,
        "rollouts": load.rollouts,
        "driving_s": driving_s,
        "episodes_s": thread_after_s - thread_before_s,
        "preparing_s": preparing.seconds,
        "sharing_s": sharing_s,
        "planning_s": planned[-1],
        "computing_s": computing_s,
        "ending_s": ending_s,
        "packing_s": packing_s,
        "unpacking_s": unpacking_s,
        "packed_bytes": len(payload),
        "pool_us": pool_us,
        "virtual_s": virtual_s,
        "meetings": len(arrived),
        "requests": sum(engine.num_requests for engine in engines) - requests_before,
        "trained": batch.layout.num_tokens,
        "resent": pool.num_resent,
        "lost": len(lost),
        "record_bytes": sum(arrived),
        "number_bytes": ranks.broadcast_size,
        "row_bytes": ranks.sent_size,
    }


def compute_over_all_tokens(batch: StepBatch, ranks: Distributed) -> None:
    """Compute what every rank computes in a step with default settings, but for the passes of the model."""
    correction = StepCorrection.of(batch, FromUpdate(), CorrectionConfig())
    rollout_targets(batch, Logprobs(old=FromUpdate()), correction, AlgorithmConfig())
    trained_N = batch.sampling_logprobs_N + 0.01 * torch.rand(batch.layout.num_tokens)
    mismatch_metrics(
        trained_N,
        batch.sampling_logprobs_N,
        batch.rollout_N,
        batch.num_rollouts,
        correction=correction.measured(batch, trained_N),
        version_T=batch.versions_N,
        current_version=0,
        spread=ranks.spread,
    )


def end_step(rollouts: list[Rollout], batch: StepBatch) -> None:
    """Do what rank 0 does with the tokens of all rollouts at the end of a step: check their rows, and save them."""
    if rollouts:
        token_metrics(rollouts, batch)
        with tempfile.TemporaryDirectory() as folder:
            write_rollouts(Path(folder) / "step.jsonl", rollouts)


async def pool_s(pool: EnginePool) -> float:
    """Return the CPU time that the pool takes for a request: its choice of an engine, and the shortest context."""

    async def answer(member: PooledEngine) -> int:
        return pool.max_model_len

    start = time.thread_time()
    for number in range(POOL_REQUESTS):
        await pool._ask(answer, (number,))
    return (time.thread_time() - start) / POOL_REQUESTS


def serve(words: Sequence[int], vocab_size: int, sender: Connection) -> None:
    """Run the scripted server; send its address."""

    async def run() -> None:
        script = Script(words=words, vocab_size=vocab_size, max_model_len=MAX_MODEL_LEN, lengths=TOKENS)
        runner = web.AppRunner(scripted_server(script))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        sender.send(f"http://127.0.0.1:{runner.addresses[0][1]}")
        await asyncio.Event().wait()

    asyncio.run(run())


class Field:
    """Parts that all points share: the chat, the words of answers, and one scripted server."""

    def __init__(self) -> None:
        workload = WORKLOADS["multi_equal"]
        workload.prepare()
        self._chat = Chat.from_pretrained(workload.model_path)
        self._words = sorted(set(self._chat.tokenizer.encode(f"question {ANSWER}", add_special_tokens=False)))
        self._context = multiprocessing.get_context("fork")

    def __enter__(self) -> Field:
        receiver, sender = self._context.Pipe(duplex=False)
        vocab_size = max(max(self._words), *self._chat.stop_token_ids) + 1
        self._server = self._context.Process(target=serve, args=(self._words, vocab_size, sender), daemon=True)
        self._server.start()
        sender.close()
        self._url = receiver.recv()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.terminate()
        self._server.join()

    def measure(self, load: Load) -> list[dict[str, float]]:
        """Return the costs of each rank."""
        return on_ranks(load.ranks, lambda rank, port: drive(rank, load, port, self._url, self._chat, self._words))

    def apart(self, count: int, load: Load) -> list[dict[str, float]]:
        """Return the costs of several processes at once, each of which is the only rank of its own."""
        return on_ranks(count, lambda rank, port: drive(0, load, port, self._url, self._chat, self._words))

    def best(self, load: Load, repeats: int) -> list[dict[str, float]]:
        """Return the costs of the run whose busiest rank took the least CPU time; other load only adds to it."""
        runs = [self.measure(load) for _ in range(repeats)]
        return min(runs, key=lambda costs: max(cost["driving_s"] for cost in costs))


def on_ranks(ranks: int, work: Callable[[int, int], T]) -> list[T]:
    """Return the result of `work(rank, port)` of each rank. Each is a fork, which inherits the imports."""
    context, port = multiprocessing.get_context("fork"), get_free_port()
    receivers, processes = [], []
    for rank in range(ranks):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=lambda r=rank, s=sender: s.send(work(r, port)), daemon=True)
        process.start()
        sender.close()  # otherwise `recv` would wait forever if the process dies
        receivers.append(receiver)
        processes.append(process)
    results = [receiver.recv() for receiver in receivers]
    for process in processes:
        process.join()
    return results


def meetings(ranks: int, repeats: int) -> dict[str, Any]:
    """Return the row of the meetings of a number of ranks, of the cheapest run."""
    runs = [on_ranks(ranks, lambda rank, port: meet(rank, ranks, port)) for _ in range(repeats)]
    costs = min(runs, key=lambda costs: statistics.median(cost["cpu_s"] for cost in costs))
    return {
        "ranks": ranks,
        "ms/meeting": 1e3 * statistics.median(cost["cpu_s"] for cost in costs),
        "busiest rank": 1e3 * max(cost["cpu_s"] for cost in costs),
        "elapsed, ms": 1e3 * max(cost["elapsed_s"] for cost in costs),
    }


def apart(field: Field, count: int, load: Load, repeats: int) -> dict[str, Any]:
    """Return the row of a number of processes that share nothing, of the cheapest run."""
    runs = [[cost["episodes_s"] for cost in field.apart(count, load)] for _ in range(repeats)]
    return {"ranks": count, "of it episodes": max(min(runs, key=max))}


def points(name: str, common: Mapping[str, float], *, is_quick: bool) -> list[Load]:
    """Return the loads of a sweep."""
    scale = 8 if is_quick else 1

    def load(ranks: int, engines: int, rollouts: int, **changes: Any) -> Load:
        return Load(ranks=ranks, engines=engines // scale, rollouts=rollouts // scale, **common, **changes)

    match name:
        case "engines":
            return [load(1, count, 2 * count) for count in (64, 128, 256, 512, 1024)][: 2 if is_quick else None]
        case "drivers":
            engines = 64 if is_quick else 1024
            return [load(count, engines, 2 * engines) for count in ((1, 2) if is_quick else (1, 2, 4))]
        case "ranks":
            return [load(count, 64 * count, 256 * count) for count in ((1, 2, 4) if is_quick else (1, 2, 4, 8))]
        case "http":
            return [load(1, 64, 128, http_every=every) for every in (0, 1)]
        case "turns":
            return [load(1, 64, 128, turns=turns) for turns in (SHORT, AGENTS)]
    raise ValueError(f"found {name}, expected one of {', '.join(SWEEPS)}")


def fit(rounds: int) -> list[dict[str, float]]:
    """Return the time of a step of a real vLLM server by the number of its requests, which all have as many tokens."""
    workload = WORKLOADS["multi_equal"]
    workload.prepare()
    os.environ.update(ENVIRONMENT)
    key = secrets.token_urlsafe(16)
    rows = []
    with (
        tempfile.TemporaryDirectory() as logs,
        BackgroundLoop() as loop,
        server(workload.model_path, key, Path(logs) / "server.log") as (url, _),
    ):
        engine = ServerEngine(url, loop=loop, vocab_size=384, api_key=key)

        async def at_once(count: int) -> None:
            samplings = [Sampling(max_tokens=FIT_TOKENS, ignore_eos=True, seed=number) for number in range(count)]
            await asyncio.gather(*(engine.generate([5, 6, 7, 8 + i % 200], s) for i, s in enumerate(samplings)))

        for count in FIT_REQUESTS:
            times = []
            for _ in range(rounds + 1):
                start = time.perf_counter()
                loop.run(at_once(count))
                times.append((time.perf_counter() - start) / FIT_TOKENS)
            rows.append({"requests": count, "ms per step": 1e3 * min(times[1:])})
        loop.run(engine.close())
    return rows


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=SWEEPS, default=list(SWEEPS))
    parser.add_argument("--repeats", type=int, default=1, help="runs of each point, of which the cheapest counts")
    parser.add_argument("--fit", action="store_true", help="measure the time of a step of a real server, and stop")
    parser.add_argument("--base-ms", type=float, default=BASE_MS, help="an engine's step without requests [ms]")
    parser.add_argument("--per-request-ms", type=float, default=PER_REQUEST_MS, help="what each request adds [ms]")
    args = parser.parse_args()
    if args.fit:
        rows = fit(1 if args.quick else FIT_ROUNDS)
        line = statistics.linear_regression([row["requests"] for row in rows], [row["ms per step"] for row in rows])
        numbers = {"base_ms": line.intercept, "per_request_ms": line.slope}
        report("scale", rows, numbers, as_json=args.json, details={"tokens": FIT_TOKENS})
        return
    torch.set_num_threads(1)  # forks would inherit a thread pool without its threads
    common = {"base_s": args.base_ms / 1e3, "per_request_s": args.per_request_ms / 1e3}
    numbers: dict[str, float] = {}
    sweeps: dict[str, list[dict[str, Any]]] = {}
    measured: dict[Load, list[dict[str, float]]] = {}
    with Field() as field:
        for name in args.only:
            if name == "meetings":
                sweeps[name] = [meetings(ranks, args.repeats) for ranks in ((2, 4) if args.quick else (2, 4, 8, 16))]
            elif name == "apart":
                loads = points("ranks", common, is_quick=args.quick)
                sweeps[name] = [apart(field, load.ranks, loads[0], args.repeats) for load in loads]
            else:
                loads = points(name, common, is_quick=args.quick)
                measured |= {load: field.best(load, args.repeats) for load in loads if load not in measured}
                sweeps[name] = [summary(measured[load]) for load in loads]
            numbers |= exponents(name, sweeps[name])
            print(f"\n{name}\n{table(sweeps[name])}", flush=True)
    alone = [cost for load, costs in measured.items() if load.ranks == 1 for cost in costs]
    if alone:
        tokens = sum(cost["trained"] for cost in alone)
        numbers["packing_us_per_token"] = 1e6 * sum(cost["packing_s"] for cost in alone) / tokens
        numbers["unpacking_us_per_token"] = 1e6 * sum(cost["unpacking_s"] for cost in alone) / tokens
        numbers["record_bytes_per_token"] = sum(cost["packed_bytes"] for cost in alone) / tokens
    rows = outlook(sweeps, numbers) if {"ranks", "http", "meetings"} <= set(sweeps) else []
    report("scale", rows, numbers, as_json=args.json, details={**common, "sweeps": sweeps})


if __name__ == "__main__":
    main()
