"""Lockstep's side of a comparison: an ordinary run that waits for its turn after each update.

A turn includes everything: rollouts, reward, score, update, weight sync with its canary, logs, saved rollouts.
Settings are those of the workload and of `speed`.
"""

from __future__ import annotations

import argparse
import os
import pickle
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.ranks import start_other_ranks
from harness.turns import Turn
from harness.workloads import COMPARED, AnyWorkload, configuration
from lockstep.trainer.observe.step_metrics import StepReport
from lockstep.trainer.run.run import run

MAX_ENGINES = 4
"""Engines start one after the other, in ten seconds each; more were not tried."""
UNSAVED = ("checkpoint.every=0", "logger.print_rollouts_every=0", "data.heldout_path=null", "eval.every=0")
UNSAVED += ("eval.before_training=false",)
"""Settings that leave out the work between updates."""


def speed(workload: AnyWorkload) -> list[str]:
    """Return the settings of speed alone: an engine per core, all of the first rank, as ranks share the machine."""
    return [
        f"rollout.num_engines={min(MAX_ENGINES, len(os.sched_getaffinity(0)))}",
        f"rollout.compile_engine={str(workload.is_engine_compiled).lower()}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=COMPARED)
    parser.add_argument("--updates", type=int, required=True)
    parser.add_argument("--ranks", type=int, default=1, help="number of ranks")
    parser.add_argument("--run-root", required=True)
    parser.add_argument("--plain", action="store_true", help="leave engines as the configuration has them")
    parser.add_argument("--rows-to", type=Path, help="file for the rows of each update, for limit_side.py")
    parser.add_argument("settings", nargs="*", help="further settings of the run")
    arguments = parser.parse_intermixed_args()
    turn = Turn()
    start_other_ranks(arguments.ranks)

    def on_step(report: StepReport) -> None:
        if not turn.is_heard:  # only the first rank knows the rewards
            turn.over()
            return
        counts = [row.num_trained for row in report.batch.rows]
        if arguments.rows_to:
            arguments.rows_to.write_bytes(pickle.dumps(report.batch))
        times = {name: value for name, value in report.metrics.items() if name.startswith("time/")}
        turn.over(
            trained_tokens=sum(counts),
            longest=max(counts),
            reward=report.metrics["reward/mean"],
            **times,
            **({"seconds": times["time/step"]} if report.update == 1 else {}),  # without the startup
        )

    workload = COMPARED[arguments.workload]
    settings = [
        *workload.settings(),
        *([] if arguments.plain else speed(workload)),
        *UNSAVED,
        f"updates={arguments.updates}",
        f"run_root={arguments.run_root}",
        *arguments.settings,
    ]
    run(configuration(settings), on_step)


if __name__ == "__main__":
    main()
