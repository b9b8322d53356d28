"""Time from the command to the first update of the demo, by stage.

    python benchmarks/startup.py [--repeats 2]

Lines that the run prints are milestones; each is reported with the time since the one before. A second run with `python
-X importtime` gives the import time of the largest packages in the main process, each with the modules that it was the
first to import. Not covered: compiled kernels, downloads, several ranks.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time

from harness.results import argument_parser, report
from harness.workloads import ROOT, WORKLOADS

MILESTONES = (
    ("settings and imports", "run directory"),
    ("joining ranks", "starting the engine"),
    ("engine and model", "memory"),
    ("data, rewards, weight transfer", "engine ready"),
    ("first sync and update", "update 1/1"),
)
"""Stage, and the beginning of the line that the run prints after it."""
PACKAGES = ("torch", "transformers", "accelerate", "peft", "datasets", "vllm", "deepspeed", "wandb", "hydra")


def command(run_root: str) -> list[str]:
    workload = WORKLOADS["multi_equal"]
    return [
        "scripts/train.py",
        "experiment=demo",
        f"model.path={workload.model_path}",
        f"data.path={workload.data_path}",
        "data.heldout_path=null",
        f"run_root={run_root}",
        "updates=1",
        "rollout.prompts_per_step=2",
        "rollout.samples_per_prompt=2",
    ]


def milestones() -> dict[str, float]:
    """Start a run; return the seconds of each stage."""
    with tempfile.TemporaryDirectory() as run_root:
        start = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-u", *command(run_root)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        assert process.stdout is not None
        seconds, last, pending = {}, start, list(MILESTONES)
        for line in process.stdout:
            if pending and line.startswith(pending[0][1]):
                now = time.perf_counter()
                seconds[pending.pop(0)[0]] = now - last
                last = now
        if process.wait() or pending:
            raise RuntimeError(
                f"the run ended with status {process.returncode} before: {[what for what, _ in pending]}"
            )
    return seconds | {"in all": last - start}


def imports() -> dict[str, float]:
    """Return the import seconds of a run by package, with the modules that it was the first to import."""
    with tempfile.TemporaryDirectory() as run_root:
        result = subprocess.run(
            [sys.executable, "-X", "importtime", *command(run_root)],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
    seconds = dict.fromkeys(PACKAGES, 0.0)
    for line in result.stderr.splitlines():
        match = re.match(r"import time:\s+(\d+) \|\s+(\d+) \|\s*(\S+)", line)
        if match and (package := match[3].partition(".")[0]) in seconds:
            seconds[package] += int(match[1]) / 1e6
    return {f"import {package}": value for package, value in seconds.items() if value}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    WORKLOADS["multi_equal"].prepare()
    starts = [milestones() for _ in range(1 if args.quick else args.repeats)]
    stages = {name: statistics.median(start[name] for start in starts) for name in starts[0]}
    if not args.quick:
        stages |= imports()
    rows = [{"stage": name, "s": seconds} for name, seconds in stages.items()]
    report("startup", rows, {"seconds_to_first_update": stages["in all"]}, as_json=args.json)


if __name__ == "__main__":
    main()
