"""The comparison of a run's last evaluation with the one before training, and what it says of both at its end."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lockstep.trainer.checkpoint.run_dir import RunDirectory
from lockstep.trainer.config.schema import Config
from lockstep.trainer.evaluate.evaluator import Evaluation
from lockstep.trainer.evaluate.results import PromptResult, SetResult
from lockstep.trainer.observe.metrics_log import MetricsLog
from lockstep.trainer.run.report import Reporter

FACTS = {"sampled_tokens_mean": 5.0, "turns_mean": 1.0, "failed_fraction": 0.0}


def evaluation(*rewards: float) -> Evaluation:
    prompts = tuple(
        PromptResult(prompt=str(index), label=None, rewards=(reward,), passed=(reward >= 1,))
        for index, reward in enumerate(rewards)
    )
    return Evaluation(results=(SetResult(name="", prompts=prompts, facts=FACTS),), rollouts=())


def reporter(directory: Path) -> tuple[Any, list[str]]:
    config, said = Config(updates=20), []
    config.logger.save_rollouts = False
    parts: Any = SimpleNamespace(config=config, updater=SimpleNamespace(dump=None))
    console: Any = SimpleNamespace(say=said.append)
    log = MetricsLog(directory / "metrics.jsonl", config.logger, run_config={})
    return Reporter(parts, RunDirectory(directory), console, log), said


def test_only_the_last_evaluation_is_compared_with_the_one_before_training(tmp_path: Path) -> None:
    report, said = reporter(tmp_path)
    report.evaluation(evaluation(0.0, 0.0, 1.0, 0.0), 0)
    report.evaluation(evaluation(0.0, 1.0, 1.0, 0.0), 10)
    assert not any("before training" in line for line in said)
    report.evaluation(evaluation(1.0, 1.0, 1.0, 0.0), 20)
    (gain,) = [line for line in said if "before training" in line]
    assert gain.startswith("held-out data  mean reward 0.250 [")
    assert "] before training -> 0.750 [" in gain
    assert said[-3] == "update 20 minus update 0, on the same prompts with the same seeds"
    assert said[-1].strip() == "better on 2 prompts, worse on 0, equal on 2"


def test_without_an_evaluation_before_training_nothing_is_compared(tmp_path: Path) -> None:
    report, said = reporter(tmp_path)
    report.evaluation(evaluation(1.0, 1.0, 1.0, 0.0), 20)
    assert not any("before training" in line or "minus" in line for line in said)


def test_other_prompts_before_training_do_not_end_the_run(tmp_path: Path) -> None:
    report, said = reporter(tmp_path)
    report.evaluation(evaluation(0.0, 0.0), 0)
    report.evaluation(evaluation(1.0, 1.0, 1.0), 20)
    assert not any("minus" in line for line in said)


def test_at_its_end_a_run_says_what_held_out_data_gave_before_and_after(tmp_path: Path) -> None:
    report, _ = reporter(tmp_path)
    assert report.outcome(0).startswith("reached update 0 in 0:")
    report.evaluation(evaluation(0.0, 0.0, 1.0, 0.0), 0)
    assert "; held-out data 0.250 [" in report.outcome(0)
    assert report.outcome(0).endswith("] before training")
    report.log.write(1, {"reward/mean": 0.25})
    report.log.write(20, {"reward/mean": 0.5})
    report.evaluation(evaluation(1.0, 1.0, 1.0, 0.0), 20)
    report.evaluation(evaluation(1.0, 1.0, 1.0, 1.0), 30)  # of a branch that was left by resuming an older checkpoint
    _, reward, heldout = report.outcome(21).split("; ")
    assert reward == "mean reward 0.250 in the first step and 0.500 in the last"
    assert heldout.startswith("held-out data 0.250 [-0.240, 0.740] before training and 0.750 [")
    assert heldout.endswith("] after update 20")


def test_evaluations_with_other_settings_are_not_set_beside_each_other(tmp_path: Path) -> None:
    report, _ = reporter(tmp_path)
    report.evaluation(evaluation(0.0, 0.0), 0)
    report._config.eval.temperature = 1.0
    report.evaluation(evaluation(1.0, 1.0), 20)
    assert report.outcome(20).partition("; ")[2] == "held-out data 1.000 [0.342, 1.000] after update 20"
    report._config.eval.temperature = 0.5  # of a resumed run that ended before its first evaluation
    assert report.outcome(20).partition("; ")[2] == "held-out data 1.000 [0.342, 1.000] after update 20"


def test_damaged_records_do_not_end_the_run(tmp_path: Path) -> None:
    report, _ = reporter(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("x\n{}\n")
    assert report.outcome(20) == ""
