"""Cost of HTTP: the same requests in turns to vLLM in this process and to a server of the same model.

    python benchmarks/transport.py [--requests 256] [--tokens 64] [--rounds 5]

A sampled token with its logprob arrives in one of three ways: in process, over Lockstep's compact route, or over vLLM's
own JSON route. For each way the CPU time per token is split into generation (the engine's process) and the rest: vLLM's
front end, and over HTTP also server and client. The transport costs the rest over HTTP less the rest in process.
`compact_share` and `json_share` are that cost over the time of generation; the goal is 0.1.

On the demo's model generation is cheap, so these shares are upper bounds. The cost per token does not depend on the
model: `tokens_per_s_at_a_tenth` is the rate at which the transport takes a tenth of a core.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from harness.real_server import CONTEXT, ENVIRONMENT, KV_CACHE_GIB, server
from harness.results import argument_parser, report
from harness.workloads import WORKLOADS

from lockstep.rollout.engine.embedded import EmbeddedEngine
from lockstep.rollout.engine.engine_settings import EngineSettings
from lockstep.rollout.engine.protocol import Sampling, SyncedEngine
from lockstep.rollout.server.server_engine import GENERATE, ServerEngine
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.rollout.system.gc_freeze import gc_frozen

PROMPT_TOKENS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Cost per token of a batch of requests."""

    seconds: float
    generating_us: float
    """CPU time of the engine's process."""
    rest_us: float
    """CPU time of all other processes on the way of the token."""


def cpu_s(*processes: psutil.Process) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(time.user + time.system for time in times)


def measure(
    engine: SyncedEngine, generating: list[psutil.Process], rest: list[psutil.Process], *, requests: int, tokens: int
) -> Cost:
    """Measure one batch of concurrent requests."""

    async def all_of_them() -> None:
        prompts = [[1 + (7 * request + i) % 200 for i in range(PROMPT_TOKENS)] for request in range(requests)]
        sampling = [Sampling(max_tokens=tokens, ignore_eos=True, seed=request) for request in range(requests)]
        await asyncio.gather(*map(engine.generate, prompts, sampling))

    before = cpu_s(*generating), cpu_s(*rest)
    start = time.perf_counter()
    engine.loop.run(all_of_them())
    seconds = time.perf_counter() - start
    total = requests * tokens
    return Cost(
        seconds=seconds / total,
        generating_us=1e6 * (cpu_s(*generating) - before[0]) / total,
        rest_us=1e6 * (cpu_s(*rest) - before[1]) / total,
    )


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--requests", type=int, default=256, help="concurrent requests")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per request")
    parser.add_argument("--rounds", type=int, default=5, help="measured batches per way")
    args = parser.parse_args()
    if args.quick:
        args.requests, args.tokens, args.rounds = 32, 16, 1
    workload = WORKLOADS["multi_equal"]
    workload.prepare()
    os.environ.update(ENVIRONMENT)
    key = secrets.token_urlsafe(16)
    me = psutil.Process()
    with tempfile.TemporaryDirectory() as logs, BackgroundLoop() as loop:
        embedded_engine = EmbeddedEngine(
            EngineSettings(model=workload.model_path, max_model_len=CONTEXT, kv_cache_gib=KV_CACHE_GIB, num_threads=1),
            loop=loop,
            log_path=Path(logs) / "engine.log",
        )
        own_engine = me.children(recursive=True)
        with server(workload.model_path, key, Path(logs) / "server.log") as (url, front):
            compact, plain = (
                ServerEngine(url, loop=loop, vocab_size=embedded_engine.vocab_size, api_key=key) for _ in range(2)
            )
            plain._route = GENERATE  # the route of a server without Lockstep's middleware
            its_engine = front.children(recursive=True)
            ways: dict[str, tuple[SyncedEngine, list[psutil.Process], list[psutil.Process]]] = {
                "in process": (embedded_engine, own_engine, [me]),
                "HTTP, compact": (compact, its_engine, [me, front]),
                "HTTP, vLLM's JSON": (plain, its_engine, [me, front]),
            }
            costs_by_way: dict[str, list[Cost]] = {name: [] for name in ways}
            with gc_frozen():  # as in a run
                for number in range(args.rounds + 1):
                    for name, way in ways.items():
                        cost = measure(*way, requests=args.requests, tokens=args.tokens)
                        if number:  # the first batch compiles and fills caches
                            costs_by_way[name].append(cost)
            for remote in (compact, plain):
                loop.run(remote.close())
        loop.run(embedded_engine.close())

    def median(name: str, field: str) -> float:
        return statistics.median(getattr(cost, field) for cost in costs_by_way[name])

    rows = [
        {
            "way": name,
            "tokens/s": 1 / median(name, "seconds"),
            "generating, µs CPU": median(name, "generating_us"),
            "the rest, µs CPU": median(name, "rest_us"),
        }
        for name in ways
    ]
    in_process, *over_http = ways
    generating_us = statistics.median(cost.generating_us for costs in costs_by_way.values() for cost in costs)
    cost_us = {
        name: median(way, "rest_us") - median(in_process, "rest_us")
        for name, way in zip(("compact", "json"), over_http, strict=True)
    }
    numbers = {
        **{f"{name}_share": cost / generating_us for name, cost in cost_us.items()},
        **{f"{name}_us_per_token": cost for name, cost in cost_us.items()},
        "tokens_per_s_at_a_tenth": 0.1 * 1e6 / cost_us["compact"],
    }
    report("transport", rows, numbers, as_json=args.json, details={"requests": args.requests, "tokens": args.tokens})


if __name__ == "__main__":
    main()
