"""Trained tokens per second of whole updates, Lockstep's over those of TRL 1.16.

    python benchmarks/compare_trl.py [--json] [--quick] [--updates 6] [--ranks 2] [--workloads multi_lognormal ...]
    python benchmarks/compare_trl.py --curve 30 --workloads multi_equal      reward over wall time, both sides

Both sides have the same model, data, batch (16 prompts x 8 samples), sampling, reward, update and cores. Both trainers
run at the same time and take turns, update by update, so that other load affects them alike (`harness/turns.py`). A
trained token is one that the policy sampled; tool answers and padding do not count. Settings of each side:
`harness/lockstep_side.py`, `harness/trl_side.py`; workloads: `harness/workloads.py`.

The rate per CPU second of all processes of a side is less sensitive to other load, but does not show which side uses
the cores better.

`multi_turn_ratio` belongs to several turns with log-normal lengths, `single_turn_ratio` to one turn with equal lengths.
Missing models are made first (one to three minutes, once).
"""

from __future__ import annotations

import os
import statistics
import tempfile
from itertools import accumulate
from pathlib import Path
from typing import Any

from harness.results import argument_parser, report
from harness.turns import Opponent
from harness.workloads import PEER_ENGINES, ROOT, WORKLOADS, Workload

SIDES = ("lockstep", "trl")
HEADLINES = {"multi_turn_ratio": "multi_lognormal", "single_turn_ratio": "single_equal"}


def cores() -> int:
    return len(os.sched_getaffinity(0))


def measure(
    workload: Workload, *, updates: int, engine: str, threads: int, ranks: int, run_root: str
) -> dict[str, list[dict[str, Any]]]:
    """Return the report of each update of each side. The first one includes the startup, and rates leave it out."""
    here, logs = Path(__file__).parent / "harness", ROOT / "runs" / "benchmarks"
    common = [workload.name, "--updates", str(updates + 1), "--ranks", str(ranks)]
    environment = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    sides = {
        "lockstep": Opponent(
            here / "lockstep_side.py",
            [*common, "--run-root", run_root],
            log=logs / f"{workload.name}-lockstep.log",
            environment=environment,
        ),
        "trl": Opponent(
            here / "trl_side.py",
            [*common, "--engine", engine, "--threads", str(threads)],
            log=logs / f"{workload.name}-trl.log",
            environment=environment,
        ),
    }
    try:
        said = {name: [side.first_turn()] for name, side in sides.items()}
        for _ in range(updates):
            for name, side in sides.items():
                said[name].append(side.turn())
    finally:
        for side in sides.values():
            side.close()
    return said


def summary(workload: Workload, said: dict[str, list[dict[str, Any]]]) -> tuple[list[dict[str, object]], float]:
    """Return a row per side, and the ratio of their rates over all measured updates."""
    rows, rates = [], {}
    for side in SIDES:
        turns = said[side][1:]
        seconds, cpu_s, tokens = (sum(turn[name] for turn in turns) for name in ("seconds", "cpu_s", "trained_tokens"))
        rates[side] = tokens / seconds
        rows.append(
            {
                "workload": workload.name,
                "side": side,
                "s/update": statistics.median(turn["seconds"] for turn in turns),
                "trained tokens/update": round(tokens / len(turns)),
                "longest": max(turn["longest"] for turn in turns),
                "trained tokens/s": rates[side],
                "trained tokens/CPU s": tokens / cpu_s,
            }
        )
    ratio = rates["lockstep"] / rates["trl"]
    rows[0]["ratio"] = ratio
    return rows, ratio


def curve(turns: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Return (cumulative seconds, mean reward) of each update without the startup."""
    seconds = accumulate(turn["seconds"] for turn in turns[1:])
    return [(round(at, 2), round(turn["reward"], 3)) for at, turn in zip(seconds, turns[1:], strict=True)]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--updates", type=int, default=6, help="measured updates per side and workload")
    parser.add_argument(
        "--curve", type=int, metavar="UPDATES", help="measure this number of updates and record the reward of each"
    )
    parser.add_argument(
        "--ranks", type=int, default=1, help="processes of each trainer; with several, each of Lockstep's has an engine"
    )
    parser.add_argument("--threads", type=int, help="compute threads of each rank (default: all cores, split evenly)")
    parser.add_argument(
        "--peer-engine", choices=PEER_ENGINES, default="transformers", help="engine of TRL's generation"
    )
    args = parser.parse_args()
    threads = args.threads or max(1, cores() // args.ranks)
    names = list(HEADLINES.values()) if args.quick else args.workloads
    updates = 2 if args.quick else args.curve or args.updates
    rows: list[dict[str, object]] = []
    ratios, curves = {}, {}
    (ROOT / "runs").mkdir(exist_ok=True)
    for workload in (WORKLOADS[name] for name in names):
        workload.prepare()
        with tempfile.TemporaryDirectory(dir=ROOT / "runs", prefix=".benchmark-") as run_root:
            said = measure(
                workload,
                updates=updates,
                engine=args.peer_engine,
                threads=threads,
                ranks=args.ranks,
                run_root=run_root,
            )
        of_workload, ratios[workload.name] = summary(workload, said)
        rows += of_workload
        curves[workload.name] = {side: curve(said[side]) for side in SIDES}
    numbers = {headline: ratios[name] for headline, name in HEADLINES.items() if name in ratios}
    others = {f"{name}_ratio": ratio for name, ratio in ratios.items() if name not in HEADLINES.values()}
    report(
        "compare_trl",
        rows,
        numbers | others,
        as_json=args.json,
        details={"peer_engine": args.peer_engine, "ranks": args.ranks, "curves": curves if args.curve else {}},
    )


if __name__ == "__main__":
    main()
