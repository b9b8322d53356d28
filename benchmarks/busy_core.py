"""An update while another program takes a core, over an update on idle cores.

    python benchmarks/busy_core.py [--workloads multi_equal real] [--repeats 3] [--busy 1 2] [--threads 2] [--no-trl]

`--busy 1` has one process that computes all the time, pinned to one core; `--busy 2` one on each of two cores, and so
on around the cores. The goal is at most 2 for `--busy 1`.

Lockstep's side is an ordinary run, in turns with TRL's (`harness/turns.py`), with the threads
that the checkout chooses unless `--threads` is given. Updates with idle and with busy cores take turns, too, so that
other load affects all of them alike. Lengths of rollouts differ, so times are per trained token. The learning rate is
almost 0, so that they do not change from update to update. `update` is the stage of that name: forward, backward and
optimizer. `step` has rollouts and weight sync, too; TRL reports only that.

The busy processes end with this program, also if it is killed (`harness/busy.py`).
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.busy import busy_cores
from harness.results import argument_parser, report
from harness.turns import Opponent
from harness.workloads import COMPARED, ROOT

from lockstep.rollout.system.compute_threads import waiting

STILL = "optimizer.lr=1e-9"
"""Setting that keeps the lengths of rollouts."""
CLOCKS = {"lockstep": ("time/update", "seconds"), "trl": ("seconds",)}
"""Times of each side: the update stage, and the step."""
NAMES = {"time/update": "update", "seconds": "step"}
Said = dict[int, list[Mapping[str, Any]]]
"""Reports of the updates by number of busy processes."""


def pins(count: int) -> list[int]:
    """Return the core of each busy process."""
    cores = sorted(os.sched_getaffinity(0))
    return [cores[index % len(cores)] for index in range(count)]


def measure(name: str, *, busy: Sequence[int], repeats: int, threads: int | None, with_trl: bool) -> dict[str, Said]:
    """Return the reports of each side, by number of busy processes; 0 is idle."""
    here, logs = Path(__file__).parent / "harness", ROOT / "runs" / "benchmarks"
    rounds = [0, *busy]
    updates = 2 + repeats * len(rounds)
    environment = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    (ROOT / "runs").mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=ROOT / "runs", prefix=".benchmark-") as folder,
        contextlib.ExitStack() as stack,
    ):
        common = [name, "--updates", str(updates), STILL]
        sides: dict[str, Opponent] = {}

        def start(side: str, arguments: Sequence[str], **further: str) -> None:
            sides[side] = Opponent(
                here / f"{side}_side.py",
                [*common, *arguments],
                log=logs / f"busy-{name}-{side}.log",
                environment={**environment, **further},
            )
            stack.callback(sides[side].kill)

        start("lockstep", ["--run-root", folder, "--plain"], **waiting())
        if with_trl:
            start("trl", [], OMP_NUM_THREADS=str(threads or len(os.sched_getaffinity(0))))
        reports: dict[str, Said] = {side: {count: [] for count in rounds} for side in sides}
        for opponent in sides.values():
            opponent.first_turn()
            opponent.turn()  # warm
        for _ in range(repeats):
            for side, opponent in sides.items():
                for count in rounds:
                    with busy_cores(pins(count)):
                        reports[side][count].append(opponent.turn())
    return reports


def summary(name: str, said: Mapping[str, Said]) -> tuple[list[dict[str, object]], dict[str, float]]:
    """Return a row per side and clock, and the ratios busy over idle by name."""
    rows, ratios = [], {}
    for side, of_side in said.items():
        for clock in CLOCKS[side]:
            typical = {
                count: statistics.median(turn[clock] / turn["trained_tokens"] for turn in turns)
                for count, turns in of_side.items()
            }
            row: dict[str, object] = {"workload": name, "side": side, "time": NAMES[clock]}
            row["threads"] = of_side[0][0]["threads"]
            row["idle [ms/token]"] = 1000 * typical[0]
            for count in typical.keys() - {0}:
                ratio = typical[count] / typical[0]
                row[f"{count} busy / idle"] = ratio
                ratios[f"{name}_{side}_{NAMES[clock]}_{count}_busy"] = ratio
            rows.append(row)
    return rows, ratios


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--workloads", nargs="+", choices=COMPARED, default=["multi_equal"])
    parser.add_argument("--repeats", type=int, default=3, help="updates of each kind and side")
    parser.add_argument("--busy", type=int, nargs="+", default=[1], metavar="PROCESSES", help="busy processes")
    parser.add_argument(
        "--threads", type=int, help="OMP_NUM_THREADS of both sides (default: Lockstep's own, all cores)"
    )
    parser.add_argument("--no-trl", action="store_true", help="measure Lockstep alone")
    args = parser.parse_args()
    if args.quick:
        args.repeats = 1
    rows: list[dict[str, object]] = []
    numbers: dict[str, float] = {}
    for name in args.workloads:
        COMPARED[name].prepare()
        reports = measure(
            name, busy=args.busy, repeats=args.repeats, threads=args.threads, with_trl=not (args.no_trl or args.quick)
        )
        of_workload, ratios = summary(name, reports)
        rows += of_workload
        numbers |= ratios
    report("busy_core", rows, numbers, as_json=args.json)


if __name__ == "__main__":
    main()
