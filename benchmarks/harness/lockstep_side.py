"""Lockstep's side of a comparison: an ordinary run that waits for its turn after each update.

A turn includes everything: rollouts, reward, score, update, weight sync with its canary, logs, saved rollouts.
Settings are those of the demo, with the changes in `overrides`.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore

from harness.ranks import start_other_ranks
from harness.turns import Turn
from harness.workloads import WORKLOADS, Workload
from trainer.checks.validate import validate
from trainer.cli import CONFIG_DIR, schema, to_config
from trainer.config.schema import Config
from trainer.observe.step_metrics import StepReport
from trainer.run.run import run

MAX_ENGINES = 4
"""Engines start one after the other, in ten seconds each; more were not tried."""
SENTENCE = Path(__file__).parent / "sentence.py"


def overrides(workload: Workload, *, updates: int, run_root: str, ranks: int) -> list[str]:
    """Return the settings of this workload."""
    num_engines = min(MAX_ENGINES, len(os.sched_getaffinity(0)))
    return [
        f"model={workload.task}",
        f"data={workload.task}",
        f"environment={workload.task}",
        f"model.path={workload.model_path}",
        f"data.path={workload.data_path}",
        "data.heldout_path=null",
        f"environment.max_turns={workload.max_turns}",
        f"rollout.prompts_per_step={workload.prompts}",
        f"rollout.samples_per_prompt={workload.samples_per_prompt}",
        f"rollout.max_tokens_per_turn={workload.max_tokens_per_turn}",
        f"rollout.max_model_len={workload.max_model_len}",
        f"rollout.ignore_eos={str(workload.fixed_tokens is not None).lower()}",
        f"reward.functions=[{SENTENCE}:right_sentence]",
        "reward.isolation=thread",
        f"rollout.num_engines={num_engines}" if ranks == 1 else "rollout=colocated",
        "rollout.compile_engine=true",
        f"optimizer.lr={workload.learning_rate}",
        f"updates={updates}",
        f"run_root={run_root}",
        "checkpoint.every=0",
        "logger.print_rollouts_every=0",
    ]


def configuration(workload: Workload, **settings: Any) -> Config:
    ConfigStore.instance().store(name="schema", node=schema())
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        config = to_config(compose("train", overrides=overrides(workload, **settings)))
    validate(config)
    return config


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--updates", type=int, required=True)
    parser.add_argument("--ranks", type=int, default=1, help="number of ranks; several have an engine each")
    parser.add_argument("--run-root", required=True)
    arguments = parser.parse_args()
    turn = Turn()
    start_other_ranks(arguments.ranks)

    def on_step(report: StepReport) -> None:
        if not turn.is_heard:  # only the first rank knows the rewards
            turn.over()
            return
        counts = [row.num_trained for row in report.batch.rows]
        turn.over(
            trained_tokens=sum(counts),
            longest=max(counts),
            reward=report.metrics["reward/mean"],
            **{name: value for name, value in report.metrics.items() if name.startswith("time/")},
        )

    settings = {"updates": arguments.updates, "run_root": arguments.run_root, "ranks": arguments.ranks}
    run(configuration(WORKLOADS[arguments.workload], **settings), on_step)


if __name__ == "__main__":
    main()
