"""Trained tokens per second of whole updates, Lockstep's over those of TRL 1.16, and curves of both.

    python benchmarks/compare_trl.py [--json] [--quick] [--updates 6] [--ranks 2] [--workloads multi_lognormal ...]
    python benchmarks/compare_trl.py --workloads real real_tools --updates 5      SmolLM2-135M on reasoning-gym
    python benchmarks/compare_trl.py --workloads real --curve 40 --seeds 0 1 2 --picture docs/images/real_model.png

Both sides have the same model, rows, batch, sampling, reward, update, seed and cores. Both trainers run at the same
time and take turns, update by update, so that other load affects them alike (`harness/turns.py`). A trained token is
one that the policy sampled; tool answers and padding do not count. Settings of each side: `harness/lockstep_side.py`,
`harness/trl_side.py`; workloads: `harness/workloads.py`.

Each side computes with one thread or with all cores, as it is faster in `WARM_UP` updates each before the measured
ones (reported); `--threads` sets a number instead. Lockstep's engines use all cores in any case.

The rate per CPU second of all processes of a side is less sensitive to other load, but does not show which side uses
the cores better.

`multi_turn_ratio` belongs to several turns with log-normal lengths, `single_turn_ratio` to one turn with equal lengths.
Missing models are made first (one to three minutes, once).

`--curve` measures that number of updates with all cores and records the reward of each. With `--picture` the curves of
all `--seeds`, and the greedy reward on held-out rows of the first and the last weights of both sides, are kept in a
JSON file beside the picture after each seed. The same command goes on at the first missing seed, and then draws. Both
trained models are evaluated by the same program, `scripts/evaluate.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from harness.curves import CurveFile, draw
from harness.results import argument_parser, machine, report, table
from harness.turns import Opponent
from harness.workloads import COMPARED, PEER_ENGINES, ROOT, WORKLOADS, AnyWorkload

from lockstep.rollout.system.compute_threads import waiting

SIDES = ("lockstep", "trl")
HEADLINES = {"multi_turn_ratio": "multi_lognormal", "single_turn_ratio": "single_equal"}
WARM_UP = 2
"""Updates with each number of threads, before the faster one is chosen."""
Said = dict[str, list[dict[str, Any]]]
"""Reports of the updates, by side."""


def cores() -> int:
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Both sides of a comparison, ready to start."""

    workload: AnyWorkload
    engine: str
    """Engine of TRL's generation."""
    ranks: int
    threads: Mapping[str, int] | None
    """Threads of each side; None: the faster of `candidates`."""
    settings: Sequence[str] = field(default=())
    """Further settings of both sides."""

    def candidates(self, side: str) -> list[int]:
        """Return the numbers of threads to try."""
        if self.threads is not None:
            return [self.threads[side]]
        if side == "trl" and self.engine == "vllm":
            return [cores()]  # vLLM binds the threads of its process once
        return sorted({1, max(1, cores() // self.ranks)})

    def start(self, stack: contextlib.ExitStack, *, updates: int, folder: Path, is_saved: bool) -> dict[str, Opponent]:
        """Start both trainers; they end with the stack."""
        here, logs = Path(__file__).parent / "harness", ROOT / "runs" / "benchmarks"
        common = [self.workload.name, "--updates", str(updates), "--ranks", str(self.ranks)]
        arguments = {
            "lockstep": ["--run-root", str(folder), "run_name=lockstep"],
            "trl": ["--engine", self.engine, *(["--save-to", str(folder / "trl")] if is_saved else [])],
        }
        return {
            side: stack.enter_context(
                Opponent(
                    here / f"{side}_side.py",
                    [*common, *arguments[side], *self.settings],
                    log=logs / f"{self.workload.name}-{side}.log",
                    environment={
                        "OMP_NUM_THREADS": str(max(self.candidates(side))),
                        "TOKENIZERS_PARALLELISM": "false",
                        "HF_HUB_OFFLINE": "1",
                        **(waiting() if side == "lockstep" else {}),
                    },
                )
            )
            for side in SIDES
        }


def measure(pair: Pair, *, updates: int, warm_up: int) -> tuple[Said, dict[str, int]]:
    """Return the reports of these updates of each side after the first, and the chosen threads."""
    trials = {side: pair.candidates(side) for side in SIDES}
    rounds = {side: warm_up * len(counts) if len(counts) > 1 else 0 for side, counts in trials.items()}
    with (
        tempfile.TemporaryDirectory(dir=ROOT / "runs", prefix=".benchmark-") as folder,
        contextlib.ExitStack() as stack,
    ):
        sides = pair.start(stack, updates=1 + max(rounds.values()) + updates, folder=Path(folder), is_saved=False)
        reports: Said = {side: [opponent.first_turn()] for side, opponent in sides.items()}
        threads = {side: best_threads(sides[side], trials[side], rounds=warm_up) for side in SIDES}
        for _ in range(updates):
            for side, opponent in sides.items():
                reports[side].append(opponent.turn(threads[side]))
        for opponent in sides.values():  # nothing is kept of them
            opponent.kill()
    return reports, threads


def best_threads(side: Opponent, counts: Sequence[int], *, rounds: int) -> int:
    """Return the number of threads with most trained tokens per second, over updates that take turns."""
    if len(counts) == 1 or not rounds:
        return max(counts)
    seconds, tokens = dict.fromkeys(counts, 0.0), dict.fromkeys(counts, 0.0)
    for _ in range(rounds):
        for count in counts:
            turn_report = side.turn(count)
            seconds[count] += turn_report["seconds"]
            tokens[count] += turn_report["trained_tokens"]
    return max(counts, key=lambda count: tokens[count] / seconds[count])


def summary(workload: AnyWorkload, said: Said, threads: Mapping[str, int]) -> tuple[list[dict[str, object]], float]:
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
                "threads": threads[side],
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


def stages(turns: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the median time of each stage that a side reports [s], and of the rest of an update."""
    names = [name for name in turns[-1] if name.startswith("time/") and name != "time/step"]
    medians = {name.removeprefix("time/"): statistics.median(turn.get(name, 0.0) for turn in turns) for name in names}
    whole = statistics.median(turn["seconds"] for turn in turns)
    return medians | {"the rest of an update": whole - sum(medians.values())}


def curve(turns: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Return (seconds since the start of the first update, mean reward) of each update."""
    seconds = accumulate(turn["seconds"] for turn in turns)
    return [(round(at, 2), round(turn["reward"], 4)) for at, turn in zip(seconds, turns, strict=True)]


def heldout_reward(pair: Pair, model: Path) -> float:
    """Return the mean greedy reward of a model on the held-out rows."""
    command = ["scripts/evaluate.py", *pair.workload.settings(), *pair.settings, f"model.path={model}"]
    result = subprocess.run(
        [sys.executable, *command, "eval.prompts=null"],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(result.stdout.splitlines()[-1])["eval/reward_mean"]


def train_and_evaluate(pair: Pair, *, updates: int) -> dict[str, Any]:
    """Train both sides in turns; return curve, trained tokens and held-out reward of each."""
    with tempfile.TemporaryDirectory(dir=ROOT / "runs", prefix=".benchmark-") as folder:
        with contextlib.ExitStack() as stack:
            sides = pair.start(stack, updates=updates, folder=Path(folder), is_saved=True)
            reports: Said = {side: [opponent.first_turn()] for side, opponent in sides.items()}
            for _ in range(updates - 1):
                for side, opponent in sides.items():
                    reports[side].append(opponent.turn())
        models = {"lockstep": Path(folder) / "lockstep" / "model", "trl": Path(folder) / "trl"}
        return {
            side: {
                "curve": curve(turns),
                "trained_tokens": [turn["trained_tokens"] for turn in turns],
                "heldout": heldout_reward(pair, models[side]),
            }
            for side, turns in reports.items()
        }


def record(pair: Pair, *, seeds: Sequence[int], updates: int, picture: Path) -> CurveFile:
    """Record the curves of all seeds that the file beside the picture lacks, then draw it."""
    workload = pair.workload
    settings = [text.replace(f"{ROOT}/", "") for text in workload.settings()]
    content = CurveFile(
        picture.with_suffix(".json"),
        {
            "workload": workload.name,
            "updates": updates,
            "peer_engine": pair.engine,
            "ranks": pair.ranks,
            "threads": "best" if pair.threads is None else dict(pair.threads),
            "settings": settings,
        },
    )
    for seed in content.missing(seeds):
        if "threads" not in content.facts:
            threads = pair.threads or measure(pair, updates=0, warm_up=WARM_UP)[1]
            content.note(threads=dict(threads), machine=machine())
        if "heldout_before" not in content.facts:
            content.note(heldout_before=heldout_reward(pair, workload.model_path))
        of_seed = Pair(
            workload=workload,
            engine=pair.engine,
            ranks=pair.ranks,
            threads=content.facts["threads"],
            settings=[*pair.settings, f"seed={seed}"],
        )
        print(f"seed {seed}: {updates} updates of each side", file=sys.stderr, flush=True)
        content.add(seed, train_and_evaluate(of_seed, updates=updates))
    draw(content, picture)
    return content


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--workloads", nargs="+", choices=COMPARED, default=list(WORKLOADS))
    parser.add_argument("--updates", type=int, default=6, help="measured updates per side and workload")
    parser.add_argument("--curve", type=int, metavar="UPDATES", help="record the rewards of this number of updates")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="seeds of the curves in the picture")
    parser.add_argument("--picture", type=Path, help="draw the curves of one workload here, data in a JSON file beside")
    parser.add_argument(
        "--ranks", type=int, default=1, help="processes of each trainer; the first of Lockstep's has all engines"
    )
    parser.add_argument(
        "--threads", default="best", help="compute threads of each rank: a number, or the best of 1 and all cores"
    )
    parser.add_argument(
        "--peer-engine", choices=PEER_ENGINES, default="transformers", help="engine of TRL's generation"
    )
    args = parser.parse_args()
    if args.threads != "best" and not args.threads.isdecimal():
        parser.error(f"--threads {args.threads}: expected a number, or best")
    if args.picture and (args.curve is None or len(args.workloads) != 1):
        parser.error("--picture draws the curves of one workload: add --curve UPDATES and --workloads NAME")
    threads: dict[str, int] | None = None if args.threads == "best" else dict.fromkeys(SIDES, int(args.threads))
    names = list(HEADLINES.values()) if args.quick and args.workloads == list(WORKLOADS) else args.workloads
    updates = 2 if args.quick else args.curve or args.updates
    (ROOT / "runs").mkdir(exist_ok=True)
    rows: list[dict[str, object]] = []
    ratios, curves, of_stages = {}, {}, {}
    for name in names:
        COMPARED[name].prepare()
        pair = Pair(workload=COMPARED[name], engine=args.peer_engine, ranks=args.ranks, threads=threads)
        if args.picture:
            content = record(pair, seeds=args.seeds, updates=updates, picture=args.picture)
            curves[name] = content.seeds
            rows += seed_rows(name, content)
            continue
        trials = 0 if args.curve else 1 if args.quick else WARM_UP
        reports, num_threads = measure(pair, updates=updates - bool(args.curve), warm_up=trials)
        of_workload, ratios[name] = summary(COMPARED[name], reports, num_threads)
        rows += of_workload
        curves[name] = {side: curve(reports[side]) for side in SIDES}
        of_stages[name] = stages(reports["lockstep"][1:])
    numbers = {headline: ratios[name] for headline, name in HEADLINES.items() if name in ratios}
    others = {f"{name}_ratio": ratio for name, ratio in ratios.items() if name not in HEADLINES.values()}
    if of_stages:
        print("\nStages of Lockstep's updates, medians [s]:")
        print(table([{"workload": name, **seconds} for name, seconds in of_stages.items()]))
    report(
        "compare_trl",
        rows,
        numbers | others,
        as_json=args.json,
        details={
            "peer_engine": args.peer_engine,
            "ranks": args.ranks,
            "curves": curves if args.curve else {},
            "stages": of_stages,
        },
    )


def seed_rows(name: str, content: CurveFile) -> list[dict[str, object]]:
    """Return a row per seed and side of a picture."""
    return [
        {
            "workload": name,
            "seed": seed,
            "side": side,
            "threads": content.facts["threads"][side],
            "minutes": result[side]["curve"][-1][0] / 60,
            "trained tokens/s": sum(result[side]["trained_tokens"]) / result[side]["curve"][-1][0],
            "last reward": result[side]["curve"][-1][1],
            "held out before": content.facts["heldout_before"],
            "held out after": result[side]["heldout"],
        }
        for seed, result in content.seeds.items()
        for side in SIDES
    ]


if __name__ == "__main__":
    main()
