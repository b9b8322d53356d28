"""CPU time of the trainer's process per request to an engine in it, by the way the request is handed over.

    python benchmarks/front_end.py [--requests 128 1024] [--tokens 16] [--rounds 5]

engine      `EmbeddedEngine.generate`, as rollouts call it
AsyncLLM    `AsyncLLM.generate` of the same vLLM, with a rendered prompt: what the engine adds to
LLM         `LLM.generate` of another vLLM with the same arguments, with all requests in one call

The engine's own process is not counted. All ways take turns with the same prompts, in groups of 8, and the same seeds.
`ratio_<requests>` is the time of the engine over that of AsyncLLM.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable

from harness.engine_sides import start
from harness.results import argument_parser, report
from harness.workloads import ROOT, WORKLOADS

from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.rollout.system.captured_output import redirect_output
from lockstep.rollout.system.gc_freeze import gc_frozen

PROMPT_TOKENS, GROUP = 40, 8
Way = Callable[[int, int], None]
"""Samples a number of requests in the round of a number, which enters the seeds."""


def prompt(index: int) -> list[int]:
    return [3 + (index // GROUP * 7 + place * 11) % 200 for place in range(PROMPT_TOKENS)]


def measure(sizes: list[int], tokens: int, rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds per request of each way, for each number of requests: medians of all rounds but one."""
    workload = WORKLOADS["single_equal"]
    workload.prepare()
    log = ROOT / "runs" / "benchmarks" / "front_end.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory, redirect_output(log), BackgroundLoop() as loop:
        engine = start(workload, loop, directory)
        from vllm import LLM, TokensPrompt
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        llm = LLM(**engine._args)
        names = itertools.count()

        def params(number: int, index: int) -> SamplingParams:
            return SamplingParams(
                max_tokens=tokens,
                temperature=1.0,
                ignore_eos=True,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                seed=number << 16 | index,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )

        async def one_of_engine(number: int, index: int) -> None:
            sampling = Sampling(max_tokens=tokens, ignore_eos=True, seed=number << 16 | index)
            await engine.generate(prompt(index), sampling)

        async def one_of_async_llm(number: int, index: int) -> None:
            name = f"request-{next(names)}"
            async for _ in engine.llm.generate(tokens_input(prompt(index)), params(number, index), name):
                pass

        def at_once(one: Callable) -> Way:
            async def batch(size: int, number: int) -> None:
                await asyncio.gather(*(one(number, index) for index in range(size)))

            return lambda size, number: loop.run(batch(size, number))

        def in_one_call(size: int, number: int) -> None:
            prompts = [TokensPrompt(prompt_token_ids=prompt(index)) for index in range(size)]
            llm.generate(prompts, [params(number, index) for index in range(size)], use_tqdm=False)

        ways: dict[str, Way] = {
            "engine": at_once(one_of_engine),
            "AsyncLLM": at_once(one_of_async_llm),
            "LLM": in_one_call,
        }
        costs: dict[str, list[float]] = {name: [] for name in ways}
        with gc_frozen():  # as in a run
            for size in sizes:
                times: dict[str, list[float]] = {name: [] for name in ways}
                for number in range(rounds + 1):
                    for name, way in ways.items():
                        loop.run(engine.reset_prefix_cache())
                        llm.reset_prefix_cache()
                        begin = time.process_time()
                        way(size, number)
                        times[name].append((time.process_time() - begin) / size)
                for name, values in times.items():
                    costs[name].append(1e3 * statistics.median(values[1:]))
        llm.llm_engine.engine_core.shutdown()
        loop.run(engine.close())
    return costs


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[128, 1024], help="concurrent requests")
    parser.add_argument("--tokens", type=int, default=16, help="tokens of every answer")
    parser.add_argument("--rounds", type=int, default=5, help="measured batches per way")
    args = parser.parse_args()
    if args.quick:
        args.requests, args.rounds = [8, 16], 1
    costs = measure(args.requests, args.tokens, args.rounds)
    rows = [
        {"way": name, **{f"{size} requests, ms": value for size, value in zip(args.requests, values, strict=True)}}
        for name, values in costs.items()
    ]
    numbers = {
        f"ratio_{size}": ours / theirs
        for size, ours, theirs in zip(args.requests, costs["engine"], costs["AsyncLLM"], strict=True)
    }
    report("front_end", rows, numbers, as_json=args.json, details={"tokens": args.tokens})


if __name__ == "__main__":
    main()
