"""Rollouts per second with asynchronous rollouts, compared with a synchronous run, on the demo with a slow tool.

    python benchmarks/asynchrony.py [--updates 20] [--staleness 1] [--max-delay 2.0] [--seeds 0] [--json]

Runs scripts/train.py on the calculator, each of whose answers takes between 0 and `--max-delay` seconds: synchronous,
ahead with stragglers waited for, ahead with stragglers dropped. Rollouts per second are trained rollouts over the time
of the steps (`time/step`), without the first steps, in which the engine starts and the lead builds up. Also reported:
the share of the step in which the trainer waits, the version lag of trained tokens, the share of dropped rollouts, and
the reward in each quarter of the run.

The clock is wall time, because the benchmark measures waiting. Not measured: a trainer and an engine on different GPUs.
On a CPU both share the cores, so asynchrony hides waiting, but sampling only in part.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from harness.results import Row, argument_parser, report

ROOT = Path(__file__).resolve().parents[1]
WARM_UP = 3
"""Number of first updates that are left out of times."""
QUARTERS = 4

Metrics = dict[str, float]
"""Metrics of one update."""


def sides(staleness: int) -> dict[str, list[str]]:
    ahead = f"rollout.max_staleness={staleness}"
    return {
        "synchronous": ["rollout.max_staleness=0"],
        f"staleness {staleness}, wait": [ahead, "rollout.stragglers=wait"],
        f"staleness {staleness}, drop": [ahead, "rollout.stragglers=drop"],
    }


def run(overrides: list[str], args: Namespace, seed: int) -> list[Metrics]:
    """Train in a process of its own and a temporary directory; return its metrics."""
    with tempfile.TemporaryDirectory(prefix="lockstep-asynchrony-") as root:
        own = ["experiment=demo", "environment=slow_calculator", f"environment.settings.max_delay_s={args.max_delay}"]
        own += [f"updates={args.updates}", f"seed={seed}", f"run_root={root}", "run_name=run"]
        own += ["checkpoint.every=0", "logger.print_rollouts=0", *overrides]
        command = [sys.executable, "scripts/train.py", *own]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return [json.loads(line) for line in (Path(root) / "run/metrics.jsonl").read_text().splitlines()]


def rollouts_per_s(lines: Sequence[Metrics]) -> float:
    return sum(line["rollout/delivered"] for line in lines) / sum(line["time/step"] for line in lines)


def summary(name: str, runs: Sequence[list[Metrics]]) -> Row:
    """Return a row of means over the updates of all runs (seeds)."""
    steady = [line for lines in runs for line in lines[WARM_UP:]]
    lines = [line for lines in runs for line in lines]
    num_dropped = sum(line.get("rollout/dropped_stale", 0.0) for line in lines)
    rewards = np.mean([[line["reward/mean"] for line in lines] for lines in runs], axis=0)
    return {
        "": name,
        "rollouts/s": rollouts_per_s(steady),
        "waiting": float(np.mean([line["perf/idle_frac"] for line in steady])),
        "lag, max": max(line["rollout_correction/version_lag_max"] for line in lines),
        "lag, mean": float(np.mean([line["rollout_correction/version_lag_mean"] for line in steady])),
        "dropped": num_dropped / (num_dropped + sum(line["rollout/delivered"] for line in lines)),
        "reward by quarter": " ".join(f"{part.mean():.2f}" for part in np.array_split(rewards, QUARTERS)),
    }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--max-delay", type=float, default=2.0, help="longest delay of a tool answer [s]")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    args = parser.parse_args()
    if args.quick:
        args.updates = 8

    rows = [
        summary(name, [run(overrides, args, seed) for seed in args.seeds])
        for name, overrides in sides(args.staleness).items()
    ]
    speeds = [float(row["rollouts/s"]) for row in rows]  # type: ignore[arg-type]
    numbers = {"ratio_wait": speeds[1] / speeds[0], "ratio_drop": speeds[2] / speeds[0]}
    report("asynchrony", rows, numbers, as_json=args.json)


if __name__ == "__main__":
    main()
