"""Rollouts per second with rollouts made ahead against a synchronous run, on the demo with a slow tool.

    python benchmarks/asynchrony.py [--updates 20] [--staleness 1] [--max-delay 2.0] [--seeds 0]

Whole runs of scripts/train.py on the calculator, each of whose answers takes between 0 and `--max-delay` seconds:
synchronous, ahead with stragglers waited for, ahead with stragglers dropped. Rollouts per second are trained rollouts
over the time of the steps (`time/step`), the first steps left out in which nothing was ahead yet. Printed beside the
ratio: the trainer's idle share, the largest version lag, what was dropped, and the reward over the updates.

The clock is the wall's, because waiting is what is measured. Not measured: a trainer and an engine on different GPUs;
on a CPU both compute on the same cores, so that only waiting is hidden, not sampling.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
WARM_UP = 3
REWARD_BINS = 4


def settings(staleness: int) -> dict[str, list[str]]:
    ahead = [f"rollout.max_staleness={staleness}"]
    return {
        "synchronous": ["rollout.max_staleness=0"],
        f"staleness {staleness}, wait": [*ahead, "rollout.stragglers=wait"],
        f"staleness {staleness}, drop": [*ahead, "rollout.stragglers=drop"],
    }


def run(overrides: list[str], args: argparse.Namespace, seed: int) -> list[dict[str, float]]:
    """Metrics of every update of one run."""
    with tempfile.TemporaryDirectory(prefix="lockstep-asynchrony-") as root:
        subprocess.run(
            [
                sys.executable, "scripts/train.py", "environment=slow_calculator", f"updates={args.updates}",
                f"environment.settings.max_delay_s={args.max_delay}", f"seed={seed}", f"run_root={root}",
                "run_name=run", "checkpoint.every=0", "logger.print_rollouts=0", *overrides,
            ],
            cwd=ROOT, check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        return [json.loads(line) for line in (Path(root) / "run/metrics.jsonl").read_text().splitlines()]


def rollouts_per_s(lines: list[dict[str, float]]) -> float:
    steady = lines[WARM_UP:]
    return sum(line["rollout/delivered"] for line in steady) / sum(line["time/step"] for line in steady)


def describe(name: str, runs: list[list[dict[str, float]]], base: float) -> str:
    lines = [line for run in runs for line in run]
    speed = float(np.mean([rollouts_per_s(run) for run in runs]))
    rewards = np.mean([[line["reward/mean"] for line in run] for run in runs], axis=0)
    curve = " ".join(f"{part.mean():.2f}" for part in np.array_split(rewards, REWARD_BINS))
    dropped = sum(line.get("rollout/stale_dropped", 0.0) for line in lines)
    idle = np.mean([line["perf/idle_frac"] for run in runs for line in run[WARM_UP:]])
    lag = max(line["rollout_correction/version_lag_max"] for line in lines)
    mean_lag = np.mean([line["rollout_correction/version_lag_mean"] for run in runs for line in run[WARM_UP:]])
    share = dropped / (dropped + sum(line["rollout/delivered"] for line in lines))
    cells = [
        name,
        f"{speed:.1f}",
        f"{speed / base:.2f}",
        f"{idle:.0%}",
        f"{lag:.0f}",
        f"{mean_lag:.2f}",
        f"{share:.1%}",
    ]
    return f"| {' | '.join(cells)} | {curve} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--max-delay", type=float, default=2.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    args = parser.parse_args()

    print("| | rollouts/s | ratio | idle | lag, max | lag, mean | dropped | reward over the run |")
    print("|---|---|---|---|---|---|---|---|")
    base = 0.0
    for name, overrides in settings(args.staleness).items():
        runs = [run(overrides, args, seed) for seed in args.seeds]
        base = base or float(np.mean([rollouts_per_s(lines) for lines in runs]))
        print(describe(name, runs, base), flush=True)


if __name__ == "__main__":
    main()
