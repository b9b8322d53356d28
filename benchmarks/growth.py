"""Growth of an update's time and memory with row length, batch, group size, turns, vocabulary, layers and ranks.

    python benchmarks/growth.py [--only length vocabulary ...] [--threads 1]

Each point is a whole `Trainer.step` on prepared rollouts (as in benchmarks/update.py), in a process of its own, because
the peak memory of a process never decreases. Reports the fitted exponent k of value ∝ size^k, for the time of a step
and for the memory that it adds. 1 is linear growth. Ranks share one batch: with -1 the work is split without overhead.
`us_per_token` is the slope of a straight line through the times over the tokens of the rows, where a sweep changes
their number.

The time is the CPU time of the second step (the first one allocates), on the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from harness.models import small_qwen3
from harness.results import argument_parser, fitted_exponent, report
from harness.steps import make_rollouts, trainer_step

from lockstep.trainer.config.groups.optimizer_settings import OptimizerConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.model.policy import Policy

BASE = {
    "length": 128,
    "rows": 32,
    "group": 4,
    "turns": 1,
    "vocabulary": 4096,
    "hidden": 128,
    "layers": 2,
    "budget": 4096,
}
SWEEPS: dict[str, tuple[int, ...]] = {
    "length": (128, 256, 512, 1024, 2048),
    "rows": (16, 32, 64, 128),
    "group": (2, 4, 8, 16),
    "turns": (1, 2, 4, 8),
    "vocabulary": (4096, 16384, 65536),
    "layers": (2, 4, 8),
    "ranks": (1, 2, 4),
}
QUICK: dict[str, tuple[int, ...]] = {
    "length": (32, 64),
    "rows": (4, 8),
    "group": (2, 4),
    "turns": (1, 2),
    "vocabulary": (512, 1024),
    "layers": (1, 2),
    "ranks": (1, 2),
}


def point(sizes: dict[str, int], threads: int) -> dict[str, float]:
    """Measure a step: seconds, GiB added since before the model was made, and trained tokens per second."""
    torch.set_num_threads(threads)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    config = Config(token_budget=sizes["budget"], optimizer=OptimizerConfig(lr=1e-6))
    config.correction.noise_floor_every = 0
    policy = Policy(small_qwen3(hidden=sizes["hidden"], layers=sizes["layers"], vocab=sizes["vocabulary"]))
    rollouts = make_rollouts(
        rows=sizes["rows"],
        median=sizes["length"],
        sigma=0.0,
        vocab=sizes["vocabulary"],
        longest=sizes["budget"],
        group=sizes["group"],
        turns=sizes["turns"],
    )
    step = trainer_step(policy, config, rollouts)
    step()
    start = time.process_time()
    report = step()
    seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {
        "seconds": seconds,
        "gib": peak / 2**20,
        "row tokens": sum(len(rollout.calls[-1].all_ids) for rollout in rollouts),
        "trained tokens/CPU s": report.metrics["rollout/trained_tokens"] / seconds,
    }


def in_own_process(sizes: dict[str, int], threads: int) -> dict[str, float]:
    """Run `point` in a fork, which inherits the imports."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sender.send(point(sizes, threads)))
    process.start()
    sender.close()  # otherwise `recv` would wait forever if the process dies
    result = receiver.recv()
    process.join()
    return result


def on_ranks(sizes: dict[str, int], ranks: int) -> dict[str, float]:
    """Run `point` under `accelerate launch`: DDP over gloo, one thread per rank."""
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "configs/accelerate/ddp.yaml"]
    command = [*launcher, "--num_processes", str(ranks), "--main_process_port", "0"]
    result = subprocess.run(
        [*command, __file__, "--point", json.dumps(sizes)],
        cwd=Path(__file__).resolve().parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return max(
        (json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")), key=lambda p: p["seconds"]
    )


def sweep(name: str, values: tuple[int, ...], base: dict[str, int], threads: int) -> list[dict[str, Any]]:
    """Return one row per size."""
    rows = []
    for value in values:
        if name == "ranks":
            result = on_ranks(base, value)
        else:
            sizes = base | {name: value}
            sizes["rows"] = max(sizes["rows"], sizes["group"])
            result = in_own_process(sizes, threads)
        rows.append({"sweep": name, "size": value, **result})
    return rows


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=SWEEPS, default=list(SWEEPS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--point", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.point:
        print(json.dumps(point(json.loads(args.point), 1)), flush=True)
        return
    torch.set_num_threads(1)  # forks would inherit a thread pool without its threads
    sweeps = {name: values for name, values in (QUICK if args.quick else SWEEPS).items() if name in args.only}
    base = BASE | ({"length": 32, "rows": 4, "vocabulary": 512, "hidden": 64} if args.quick else {})
    rows: list[dict[str, Any]] = []
    exponents = {}
    for name, values in sweeps.items():
        of_sweep = sweep(name, values, base, args.threads)
        rows += of_sweep
        sizes = [row["size"] for row in of_sweep]
        for what, short in (("seconds", "time"), ("gib", "memory")):
            exponents[f"{short}_by_{name}"] = fitted_exponent(sizes, [max(row[what], 1e-6) for row in of_sweep])
        tokens = [row["row tokens"] for row in of_sweep]
        if len(set(tokens)) > 1:
            slope = statistics.linear_regression(tokens, [row["seconds"] for row in of_sweep]).slope
            exponents[f"us_per_token_by_{name}"] = slope * 1e6
    report("growth", rows, exponents, as_json=args.json, details={"base": base})


if __name__ == "__main__":
    main()
