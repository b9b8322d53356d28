"""Distance of whole training steps to the limit of the machine, and the parts of the difference.

    python benchmarks/limit.py [--workloads multi_equal real_long] [--ranks 1 2] [--updates 6]

    limit = vLLM's `LLM.generate` for the tokens of the step
          + forward and backward of decoder and head over its packs, and AdamW
          + one copy of the weights

The run is an ordinary one: rollouts with tools and rewards, scores, update, weight sync with its checks, logs. After
each of its updates other processes do the work of the limit alone, on the same rows (`harness/limit_side.py`), so other
load affects both. With several engines or ranks the limit has as many processes, each with its share, and the slowest
counts. A turn of the limit is over when its last call is, whereas episodes of the run do not wait for each other, so
the rollouts of several turns can be below their limit. The goal is a ratio of at most 1.15.

    multi_equal   the demo: 0.5 M parameters, three turns with a calculator
    real_long     SmolLM2-135M, answers of 128 tokens to prompts of about 40 that share nothing across groups
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from harness.results import argument_parser, report
from harness.turns import Opponent
from harness.workloads import COMPARED, ROOT

from lockstep.rollout.system.compute_threads import waiting

HERE = Path(__file__).parent / "harness"
WARM_UP = 1
"""Updates after the first that are not counted either: those in which the limit makes its buffers."""
OF_LIMIT = {"rollout": "engine", "update": "update", "sync": "copy"}
"""Part of the limit by stage of the run. The other stages have none."""
Turns = list[dict[str, float]]


def cores() -> int:
    return len(os.sched_getaffinity(0))


def environment(threads: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


def measure(name: str, *, ranks: int, engines: int, updates: int, settings: Sequence[str]) -> tuple[Turns, Turns]:
    """Return the turns of the run and of its limit, of which each is the slowest of its processes."""
    logs = ROOT / "runs" / "benchmarks"
    logs.mkdir(parents=True, exist_ok=True)
    threads = max(1, cores() // ranks)
    common = [f"rollout.num_engines={engines}", *settings]
    with (
        tempfile.TemporaryDirectory(dir=ROOT / "runs", prefix=".benchmark-") as folder,
        contextlib.ExitStack() as stack,
        ThreadPoolExecutor() as threads_of_limit,
    ):
        rows = Path(folder) / "rows.pickle"
        places = ["--run-root", folder, "--rows-to", str(rows)]
        run = stack.enter_context(
            Opponent(
                HERE / "lockstep_side.py",
                [name, "--updates", str(1 + WARM_UP + updates), "--ranks", str(ranks), "--plain", *places, *common],
                log=logs / f"limit-{name}-run.log",
                environment=environment(threads) | waiting(),
            )
        )
        run.first_turn()
        threads_of_engine = max(1, cores() - 1 if engines == 1 else cores() // engines)
        of_parts = {
            "engine": (engines, environment(threads_of_engine) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}),
            "update": (ranks, environment(threads) | waiting()),
        }
        limit = {
            part: [
                stack.enter_context(
                    Opponent(
                        HERE / "limit_side.py",
                        [part, name, "--rows", str(rows), "--share", str(index), str(shares), *common],
                        log=logs / f"limit-{name}-{part}-{index}.log",
                        environment=variables,
                    )
                )
                for index in range(shares)
            ]
            for part, (shares, variables) in of_parts.items()
        }
        for sides in limit.values():
            list(threads_of_limit.map(Opponent.first_turn, sides))
        of_run, of_limit = [], []
        for _ in range(WARM_UP + updates):
            of_run.append(run.turn())
            answers = {part: list(threads_of_limit.map(Opponent.turn, sides)) for part, sides in limit.items()}
            of_limit.append(
                {
                    "engine": max(answer["engine"] for answer in answers["engine"]),
                    "update": max(answer["update"] for answer in answers["update"]),
                    "copy": max(answer["copy"] for answer in answers["update"]),
                    "cpu": sum(answer["cpu"] for sides in answers.values() for answer in sides),
                }
            )
        for side in (run, *limit["engine"], *limit["update"]):  # nothing is kept of them
            side.kill()
    return of_run[WARM_UP:], of_limit[WARM_UP:]


def parts(of_run: Turns, of_limit: Turns) -> tuple[list[dict[str, Any]], float]:
    """Return a row per stage, medians [s], and the time of a step over its limit.

    A stage that was faster in the run than alone shows that alone it was not at its limit: the run's time counts.
    """
    medians = {
        name.removeprefix("time/"): statistics.median(turn.get(name, 0.0) for turn in of_run)
        for name in {name for turn in of_run for name in turn if name.startswith("time/")} - {"time/step"}
    }
    step = statistics.median(turn["seconds"] for turn in of_run)
    medians["the rest of a step"] = step - sum(medians.values())
    alone = {stage: statistics.median(turn[part] for turn in of_limit) for stage, part in OF_LIMIT.items()}
    least = {stage: min(seconds, medians[stage]) for stage, seconds in alone.items()}
    whole = sum(least.values())
    rows = [
        {
            "part": stage,
            "run [s]": medians[stage],
            "alone [s]": alone.get(stage, 0.0),
            "adds": (medians[stage] - least.get(stage, 0.0)) / whole,
        }
        for stage in [*alone, *(stage for stage in medians if stage not in alone)]
    ]
    return rows, step / whole


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--workloads", nargs="+", choices=COMPARED, default=["multi_equal", "real_long"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--engines", type=int, help="engines, all of the first rank; default: one per core")
    parser.add_argument("--updates", type=int, default=6, help="measured updates, after those that are not counted")
    parser.add_argument("settings", nargs="*", metavar="SETTING=VALUE", help="further settings of the run")
    args = parser.parse_intermixed_args()
    names, ranks, updates = (["multi_equal"], [1], 1) if args.quick else (args.workloads, args.ranks, args.updates)
    rows, numbers, details = [], {}, {}
    for name in names:
        COMPARED[name].prepare()
        for num_ranks in ranks:
            engines = args.engines or cores()
            of_run, of_limit = measure(name, ranks=num_ranks, engines=engines, updates=updates, settings=args.settings)
            key = f"{name}_{num_ranks}"
            of_parts, numbers[f"{key}_ratio"] = parts(of_run, of_limit)
            numbers[f"{key}_cpu_ratio"] = sum(turn["cpu_s"] for turn in of_run) / sum(turn["cpu"] for turn in of_limit)
            rows += [{"workload": name, "ranks": num_ranks, **row} for row in of_parts]
            details[key] = {"run": of_run, "limit": of_limit}
    report("limit", rows, numbers, as_json=args.json, details={"turns": details})


if __name__ == "__main__":
    main()
