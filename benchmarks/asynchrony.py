"""Rollouts per second with rollouts made ahead against a synchronous run, on the demo with a slow tool.

    python benchmarks/asynchrony.py [--updates 20] [--staleness 1] [--max-delay 2.0] [--seeds 0] [--json]

Whole runs of scripts/train.py on the calculator, each of whose answers takes between 0 and `--max-delay` seconds:
synchronous, ahead with stragglers waited for, ahead with stragglers dropped. Rollouts per second are trained rollouts
over the time of the steps (`time/step`), the first ones left out, in which the engine starts and nothing is ahead yet.
Beside the ratio: the share of the step in which the trainer waits, the version lag of trained tokens, what was dropped,
and the reward in each quarter of the run.

The clock is the wall's, because waiting is what is measured. Not measured: a trainer and an engine on different GPUs;
on a CPU both compute on the same cores, so that waiting is hidden, and sampling only in part.
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
"""Updates that are left out of times."""
QUARTERS = 4

Metrics = dict[str, float]
"""Of one update."""


def sides(staleness: int) -> dict[str, list[str]]:
    ahead = f"rollout.max_staleness={staleness}"
    return {
        "synchronous": ["rollout.max_staleness=0"],
        f"staleness {staleness}, wait": [ahead, "rollout.stragglers=wait"],
        f"staleness {staleness}, drop": [ahead, "rollout.stragglers=drop"],
    }


def run(overrides: list[str], args: Namespace, seed: int) -> list[Metrics]:
    """A run of its own process, in a directory that is not kept."""
    with tempfile.TemporaryDirectory(prefix="lockstep-asynchrony-") as root:
        own = ["environment=slow_calculator", f"environment.settings.max_delay_s={args.max_delay}"]
        own += [f"updates={args.updates}", f"seed={seed}", f"run_root={root}", "run_name=run"]
        own += ["checkpoint.every=0", "logger.print_rollouts=0", *overrides]
        command = [sys.executable, "scripts/train.py", *own]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return [json.loads(line) for line in (Path(root) / "run/metrics.jsonl").read_text().splitlines()]


def rollouts_per_s(lines: Sequence[Metrics]) -> float:
    return sum(line["rollout/delivered"] for line in lines) / sum(line["time/step"] for line in lines)


def summary(name: str, runs: Sequence[list[Metrics]]) -> Row:
    """One row: means over the updates of all runs (seeds)."""
    steady = [line for lines in runs for line in lines[WARM_UP:]]
    lines = [line for lines in runs for line in lines]
    dropped = sum(line.get("rollout/stale_dropped", 0.0) for line in lines)
    rewards = np.mean([[line["reward/mean"] for line in lines] for lines in runs], axis=0)
    return {
        "": name,
        "rollouts/s": rollouts_per_s(steady),
        "waiting": float(np.mean([line["perf/idle_frac"] for line in steady])),
        "lag, max": max(line["rollout_correction/version_lag_max"] for line in lines),
        "lag, mean": float(np.mean([line["rollout_correction/version_lag_mean"] for line in steady])),
        "dropped": dropped / (dropped + sum(line["rollout/delivered"] for line in lines)),
        "reward by quarter": " ".join(f"{part.mean():.2f}" for part in np.array_split(rewards, QUARTERS)),
    }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--max-delay", type=float, default=2.0, help="of one answer of the tool, at most [s]")
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
