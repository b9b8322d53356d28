"""Sampling rate compared with vLLM's offline `LLM.generate`, and idle time of the engine with slow tools.

    python benchmarks/rollouts.py [--batches 5] [--tokens 64] [--tool-s 0.3]

Single turns: 128 requests of `--tokens` tokens to the demo's model, in three processes that take turns
(`harness/engine_sides.py`). `engine_ratio` and `rollout_ratio` are tokens per second over vLLM's; the goal is 0.95.
Each side of Lockstep has two processes and vLLM has one, so other load slows Lockstep more. The CPU ratio compares
tokens per CPU second of all processes of a side.

Several turns with slow tools: 128 episodes of the demo's calculator, whose answers take `--tool-s` seconds on average.
`idle_fraction` is the share of the time in which the engine had no request although an episode could have made one; the
goal is below 0.1. `all_in_tools_fraction` is the share in which all episodes waited for tools.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import time
from pathlib import Path

from harness.engine_sides import questions, start
from harness.results import argument_parser, report
from harness.slow_tools import Meter, MeteredEngine, SlowCalculator
from harness.turns import Opponent
from harness.workloads import ROOT, WORKLOADS

from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.sampler.sampler import Sampler
from lockstep.rollout.system.background_loop import BackgroundLoop

SIDES = ("vllm", "engine", "rollouts")
CLOCKS = ("seconds", "cpu_s")


def single_turns(batches: int, tokens: int) -> dict[str, dict[str, float]]:
    """Return sampled tokens of each side per second and per CPU second, over all batches but the first."""
    script, logs = Path(__file__).parent / "harness" / "engine_sides.py", ROOT / "runs" / "benchmarks"
    threads = str(max(1, len(os.sched_getaffinity(0)) - 1))
    with contextlib.ExitStack() as stack:
        sides = {
            name: stack.enter_context(
                Opponent(
                    script,
                    [name, "--batches", str(batches + 1), "--tokens", str(tokens)],
                    log=logs / f"rollout-{name}.log",
                    environment={"OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"},
                )
            )
            for name in SIDES
        }
        for side in sides.values():
            side.first_turn()
        turns = {name: [] for name in sides}
        for _ in range(batches):
            for name, side in sides.items():
                turns[name].append(side.turn())
    return {
        name: {clock: sum(turn["tokens"] for turn in rows) / sum(turn[clock] for turn in rows) for clock in CLOCKS}
        for name, rows in turns.items()
    }


def slow_tools(mean_s: float) -> dict[str, float]:
    """Return the seconds of one batch of episodes, and shares of them."""
    workload = WORKLOADS["multi_equal"]
    workload.prepare()
    chat = Chat.from_pretrained(workload.model_path)
    sampling = Sampling(max_tokens=workload.max_tokens_per_turn, stop_token_ids=chat.stop_token_ids)
    with tempfile.TemporaryDirectory() as directory, BackgroundLoop() as loop:
        engine = start(workload, loop, directory)

        def collect(mean_s: float, step: int) -> tuple[Meter, float]:
            meter, numbers = Meter(episodes=workload.batch), itertools.count()
            sampler = Sampler(
                engine=MeteredEngine(engine, meter),  # type: ignore[arg-type]
                chat=chat,
                make_environment=lambda: SlowCalculator(meter=meter, mean_s=mean_s, seed=next(numbers)),
                max_turns=workload.max_turns,
                seed=0,
            )
            start_s = time.perf_counter()
            loop.run(
                sampler.collect(
                    questions(workload), samples_per_prompt=workload.samples_per_prompt, sampling=sampling, step=step
                )
            )
            return meter, time.perf_counter() - start_s

        collect(0.001, 0)
        meter, seconds = collect(mean_s, 1)
        loop.run(engine.close())
    return {
        "seconds": seconds,
        "idle_fraction": meter.idle_s / seconds,
        "all_in_tools_fraction": meter.starved_s / seconds,
    }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--batches", type=int, default=5, help="measured batches per side")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of every response of single turns")
    parser.add_argument("--tool-s", type=float, default=0.3, help="mean time of a tool call [s]")
    args = parser.parse_args()
    WORKLOADS["single_equal"].prepare()
    rates = single_turns(1 if args.quick else args.batches, args.tokens)
    tools = slow_tools(args.tool_s)

    def ratio(side: str, clock: str = "seconds") -> float:
        return rates[side][clock] / rates["vllm"][clock]

    rows = [
        {
            "side": side,
            "tokens/s": rate["seconds"],
            "ratio": ratio(side),
            "tokens/CPU s": rate["cpu_s"],
            "CPU ratio": ratio(side, "cpu_s"),
        }
        for side, rate in rates.items()
    ]
    numbers = {
        "engine_ratio": ratio("engine"),
        "rollout_ratio": ratio("rollouts"),
        "rollout_cpu_ratio": ratio("rollouts", "cpu_s"),
        "idle_fraction": tools["idle_fraction"],
        "all_in_tools_fraction": tools["all_in_tools_fraction"],
    }
    report(
        "rollouts",
        rows,
        numbers,
        as_json=args.json,
        details={"tokens": args.tokens, "tool_s": args.tool_s, "tools": tools},
    )


if __name__ == "__main__":
    main()
