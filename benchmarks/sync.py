"""Time and memory of a weight sync, compared with a plain copy of the same bytes through the same transport.

    python benchmarks/sync.py [--repeats 3] [--dtype bfloat16] [--engine] [--json]

A ZeRO-3 model on two ranks over gloo sends its weights to a process that only receives. Sides: parameter by parameter,
layer by layer, Lockstep's own way, and a plain copy of gathered buckets. Each size is a separate launch in which the
sides take turns. Extra memory is the peak of a rank during a sync above its memory before, in units of the largest
bucket.

`--engine` measures the whole sync into real vLLM instead, with all checks: pause, transfer, load, versions, caches,
canary, and the checksums, which a run requests only after a failed canary.

The clock is wall time, because the benchmark measures waiting. The three processes share the cores of this machine, on
which sending means copying, so less work overlaps than on a real network.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness.results import argument_parser, fitted_exponent, report

HARNESS = Path(__file__).resolve().parent / "harness"
SIZES = {
    "8M": {"hidden": 192, "layers": 4, "vocab": 32768},
    "30M": {"hidden": 384, "layers": 10, "vocab": 32768},
    "124M": {"hidden": 768, "layers": 14, "vocab": 32768},
    "508M": {"hidden": 1280, "layers": 24, "vocab": 32768},
}
GOAL_OVER_COPY, GOAL_BUCKETS = 1.5, 2.0


def launch(module: str, arguments: dict[str, Any], *, ranks: int) -> dict[str, Any]:
    """Run a program of the harness on two ranks; return the JSON object in the last line of rank 0."""
    words = [word for name, value in arguments.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
    result = subprocess.run(
        [*launcher, str(HARNESS / module), *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return next(json.loads(line) for line in reversed(result.stdout.splitlines()) if line.startswith("{"))


def against_the_copy(sizes: dict[str, dict[str, int]], args: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return rows and numbers of the sides at every size."""
    rows, points = [], []
    for name, size in sizes.items():
        options = {"dtype": args.dtype, "bucket_mib": args.bucket_mib, "repeats": args.repeats}
        point = launch("sync_sides.py", {**size, **options}, ranks=2)
        points.append(point)
        for side, seconds in point["seconds"].items():
            extra = point["extra_bytes"][side]
            rows.append(
                {
                    "model": name,
                    "side": side,
                    "seconds": seconds,
                    "GB/s": point["bytes"] / seconds / 1e9,
                    "over the copy": seconds / point["seconds"]["copy"],
                    "CPU s": point["cpu_seconds"][side],
                    "CPU over the copy": point["cpu_seconds"][side] / point["cpu_seconds"]["copy"],
                    "extra MiB": extra / 2**20,
                    "extra buckets": extra / point["largest_bucket"],
                }
            )
    ours = [row for row in rows if row["side"] == "lockstep"]
    numbers: dict[str, Any] = {
        "over_copy": ours[-1]["over the copy"],
        "over_copy_worst": max(row["over the copy"] for row in ours),
        "cpu_over_copy": ours[-1]["CPU over the copy"],
        "extra_buckets_worst": max(row["extra buckets"] for row in ours),
    }
    if len(points) > 1:
        parameters = [point["parameters"] for point in points]
        numbers["exponent"] = fitted_exponent(parameters, [point["seconds"]["lockstep"] for point in points])
    return rows, numbers


def into_an_engine(sizes: dict[str, dict[str, int]], args: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return rows and numbers of whole syncs and their checks."""
    rows = [
        {"model": name, **launch("sync_checked.py", {**size, "repeats": args.repeats}, ranks=2)}
        for name, size in sizes.items()
    ]
    last = rows[-1]
    return rows, {
        "canary_share": last["canary s"] / last["sync s"],
        "versions_share": last["versions s"] / last["sync s"],
    }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="dtype of the sent weights")
    parser.add_argument("--bucket-mib", type=float, default=512.0)
    parser.add_argument("--engine", action="store_true", help="measure whole syncs into real vLLM, with their checks")
    parser.add_argument("--only", nargs="+", choices=SIZES, default=None)
    args = parser.parse_args()
    names = args.only or (["8M"] if args.quick else ["8M", "30M"] if args.engine else list(SIZES))
    sizes = {name: SIZES[name] for name in names}
    rows, numbers = (into_an_engine if args.engine else against_the_copy)(sizes, args)
    report("sync", rows, numbers, as_json=args.json, details={"goal": [GOAL_OVER_COPY, GOAL_BUCKETS]})


if __name__ == "__main__":
    main()
