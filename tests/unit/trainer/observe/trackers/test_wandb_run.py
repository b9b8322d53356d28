"""W&B runs in offline mode, with their files read back: axis, groups, media, configuration, resume, fork."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

from lockstep.trainer.config.groups.outputs_settings import LoggerConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.config.tree import plain
from lockstep.trainer.observe.metrics_log import MetricsLog, read_metrics
from lockstep.trainer.observe.step_media import COLUMNS, PAGES, distributions, step_media, table_rows
from lockstep.trainer.observe.step_metrics import StepReport
from lockstep.trainer.observe.trackers.tracker import Page
from lockstep.trainer.observe.trackers.wandb_run import SUMMARIES, TEXTS, Lineage, WandbRun
from lockstep.trainer.run.provenance import provenance
from tests.fixtures import wandb_files
from tests.fixtures.made_up_model import TOKENIZER, FakeTrainer, step_batch, two_turns
from tests.fixtures.paths import ROOT

OFFLINE = LoggerConfig(wandb="offline", group="sweep")
HOSTILE = "</script><script>alert(1)</script>"


def step_report(update: int = 3) -> StepReport:
    rollouts = [
        replace(two_turns(number), messages=({"role": "user", "content": "hi"}, {"role": "assistant", "content": said}))
        for number, said in enumerate(("hello", HOSTILE))
    ]
    batch = step_batch(rollouts)
    logp_N = FakeTrainer(bias=0.25)(batch)
    count = batch.layout.num_tokens
    return StepReport(
        update=update, metrics={"reward/mean": 0.5}, rollouts=rollouts, batch=batch, logp_train_N=logp_N,
        advantages_N=torch.linspace(-1, 1, count), weights_N=torch.full((count,), 0.8),
    )  # fmt: skip


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run that logged two updates, the second with media."""
    directory = tmp_path_factory.mktemp("runs") / "mine"
    directory.mkdir()
    config = {"optimizer": {"lr": 0.5}, "provenance": provenance()}
    metrics = MetricsLog(directory / "metrics.jsonl", OFFLINE, run_config=config)
    metrics.write(1, {"reward/mean": 0.25, "rollout_correction/kl": 1e-7})
    metrics.write(3, {"reward/mean": 0.5, "rollout_correction/kl": 2e-7})
    metrics.media(3, lambda: step_media(step_report(), Config(), TOKENIZER, metrics.tolerating))
    metrics.close()
    assert metrics.wandb_id == wandb_files.run_record(directory).run_id
    return directory


def test_the_step_is_the_update(logged: Path):
    rows = {row["_step"]: row for row in wandb_files.history(logged)}
    assert sorted(rows) == [1, 3]
    assert rows[1]["update"] == 1
    assert rows[3]["reward/mean"] == 0.5
    assert rows[3]["media/rollouts"]["nrows"] == 2, "numbers and media of an update are one row"


def test_all_metrics_have_the_update_as_axis_and_some_a_summary(logged: Path):
    defined = wandb_files.defined_metrics(logged)
    assert defined["*"].step_metric == "update"
    axes = {name: metric.step_metric for name, metric in defined.items() if metric.step_metric}
    assert axes.keys() >= {"reward/mean", "rollout_correction/kl"}
    assert defined["reward/mean"].summary.max
    assert defined["rollout/token_match_rate"].summary.min
    assert SUMMARIES.keys() <= defined.keys()
    assert defined["update"].options.hidden


def test_the_summary_has_the_ledger_of_evidence_at_the_end_of_the_run(tmp_path: Path):
    metrics = MetricsLog(tmp_path / "metrics.jsonl", OFFLINE, run_config=plain(Config()))
    metrics.write(1, {"rollout_correction/kl": 1e-7})
    metrics.write(2, {"rollout_correction/kl": 3e-7})
    metrics.close()
    texts = {name: text for name, text in wandb_files.summary(tmp_path).items() if name.startswith("evidence/")}
    assert texts["evidence/engine against trainer"].startswith("corrected: importance weights token_truncate")
    assert "rollout_correction/kl: 3.0e-7 at worst in 2 steps" in texts["evidence/engine against trainer"]


def failing_texts(directory: Path, config: dict[str, object]) -> dict[str, str]:
    raise ValueError("no ledger")


def test_texts_of_the_summary_that_fail_leave_the_run_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    failing = [EntryPoint("evidence", f"{__name__}:failing_texts", TEXTS)]
    monkeypatch.setattr("lockstep.trainer.observe.trackers.wandb_run.entry_points", lambda group: failing)
    metrics = MetricsLog(tmp_path / "metrics.jsonl", OFFLINE, run_config={})
    metrics.write(1, {"reward/mean": 0.25})
    metrics.write(2, {"reward/mean": 0.5})
    metrics.close()
    assert [row["reward/mean"] for row in wandb_files.history(tmp_path)] == [0.25, 0.5]
    assert [record.getMessage() for record in caplog.records if "no ledger" in record.getMessage()]
    assert read_metrics(tmp_path / "metrics.jsonl")[1]["health/logger_errors"] == 1


def test_a_table_has_a_row_for_each_rollout(logged: Path):
    (file,) = wandb_files.media(logged, "table/media/rollouts*.json")
    table = json.loads(file.read_text())
    assert table["columns"] == list(COLUMNS)
    first = dict(zip(COLUMNS, table["data"][0], strict=True))
    report = step_report()
    (rollout, _) = report.rollouts
    assert first["rollout"] == 0
    assert first["tokens"] == rollout.num_sampled
    assert first["turns"].startswith("assistant: ")
    assert "assistant" not in first["prompt"]
    mean = report.advantages_N[report.batch.rollout_N == 0].mean()
    assert first["advantage"] == pytest.approx(float(mean), abs=1e-6)
    assert HOSTILE in table["data"][1][COLUMNS.index("turns")]


def test_an_untrained_rollout_is_in_the_table_without_advantage():
    report = step_report()
    failed = two_turns(7)
    object.__setattr__(report, "rollouts", [*report.rollouts, failed])
    rows = table_rows(report)
    assert rows[-1][COLUMNS.index("advantage")] is None
    assert rows[0][COLUMNS.index("advantage")] is not None


def fine_page(report: StepReport, config: Config, tokenizer: object) -> str:
    return f"<!DOCTYPE html><p>update {report.update}"


def failing_page(report: StepReport, config: Config, tokenizer: object) -> str:
    raise ValueError("no board")


def numeric_page(report: StepReport, config: Config, tokenizer: object) -> int:
    return 7


def test_a_page_of_a_package_that_fails_loses_only_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    functions = {"board": "failing_page", "number": "numeric_page", "gone": "missing_page", "moves": "fine_page"}
    pages = [EntryPoint(name, f"{__name__}:{function}", PAGES) for name, function in functions.items()]
    monkeypatch.setattr("lockstep.trainer.observe.step_media.entry_points", lambda group: pages)
    metrics = MetricsLog(tmp_path / "metrics.jsonl", LoggerConfig(wandb="off"), run_config={})
    for _ in range(2):
        media = step_media(step_report(), Config(), TOKENIZER, metrics.tolerating)
    assert media["media/moves"] == Page(html="<!DOCTYPE html><p>update 3")
    assert {"media/rollouts", "histograms/reward"} < media.keys()
    assert media.keys().isdisjoint({"media/board", "media/number", "media/gone"})
    board, number, gone = (record.getMessage() for record in caplog.records)
    assert board.startswith(
        f"media/board (entry point lockstep.media: {__name__}:failing_page) failed (ValueError: no board)"
    )
    assert "TypeError: it returned int, expected HTML as a str" in number
    assert "media/gone" in gone
    assert "missing_page" in gone
    metrics.write(3, {})
    assert read_metrics(tmp_path / "metrics.jsonl")[0]["health/logger_errors"] == 6


def test_the_token_view_is_a_page(logged: Path):
    (file,) = wandb_files.media(logged, "html/media/token_view*.html")
    page = file.read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert page.count("<script") == 2
    assert HOSTILE not in page
    assert "2.5e-01" in page  # kl_v1 of the step


def test_histograms_are_of_ratios_weights_and_lengths(logged: Path):
    row = wandb_files.history(logged)[-1]
    expected = distributions(step_report())
    for name, values in expected.items():
        drawn = row[f"histograms/{name}"]
        assert sum(drawn["values"]) == len(values)
        assert drawn["bins"][0] <= values.min() <= values.max() <= drawn["bins"][-1]
    assert expected["log_ratio"].mean() == pytest.approx(-0.25, abs=1e-6)


def test_configuration_code_and_packages_are_there(logged: Path):
    config = wandb_files.run_config(logged)
    assert config["optimizer"] == {"lr": 0.5}
    assert {"torch", "transformers", "wandb"} <= config["provenance"]["packages"].keys()
    assert config["provenance"]["code"].keys() == {"commit", "is_changed"}
    assert config["forked_from"] is None
    assert wandb_files.run_record(logged).run_group == "sweep"


def test_a_resumed_run_keeps_its_id_and_a_fork_gets_a_new_one_with_its_origin(tmp_path: Path):
    for name, is_same_run in (("same", True), ("fork", False)):
        directory = tmp_path / name
        directory.mkdir()
        lineage = Lineage(run_id="abcd1234", update=20, is_same_run=is_same_run)
        run = WandbRun(LoggerConfig(wandb="offline"), directory=directory, run_config={}, lineage=lineage)
        run.log(21, {"reward/mean": 1.0})
        run.finish(failed=False)
        assert wandb_files.run_record(directory).run_id == run.id
        assert (run.id == "abcd1234") is is_same_run
        assert wandb_files.run_config(directory)["forked_from"] == (None if is_same_run else "abcd1234?_step=20")
        assert [row["_step"] for row in wandb_files.history(directory)] == [21]


SECRET = "correct-horse-battery"
LOGGING_SCRIPT = """
from pathlib import Path

from lockstep.trainer.config.groups.outputs_settings import LoggerConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.config.tree import plain
from lockstep.trainer.cli import launch
from lockstep.trainer.observe.metrics_log import MetricsLog
from lockstep.trainer.run.provenance import provenance
from lockstep.trainer.config.tree import plain


def main(config: Config) -> None:
    directory = Path(config.run_root)
    run_config = {**plain(config), "provenance": provenance()}
    metrics = MetricsLog(directory / "metrics.jsonl", config.logger, run_config=run_config)
    metrics.write(1, {"reward/mean": 0.25})
    metrics.close()


launch(main, check=lambda config: None)
"""


@pytest.mark.long
def test_a_secret_on_the_command_line_is_in_no_file_of_wandb(tmp_path: Path):
    """Runs in its own process, because W&B reads the command line once."""
    directory = tmp_path / "run"
    directory.mkdir()
    (tmp_path / "log.py").write_text(LOGGING_SCRIPT)
    words = [f"run_root={directory}", "logger.wandb=offline", "updates=77"]
    secrets = [f"gateway.api_key={SECRET}", f"reward.settings.llm_judge={{token: {SECRET}}}"]
    subprocess.run(
        [sys.executable, str(tmp_path / "log.py"), *words, *secrets],
        check=True, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    text = "".join(str(record) for record in wandb_files.records(directory))  # blocks may split a string
    files = [path for path in (directory / "wandb").rglob("*") if path.is_file()]
    assert {".wandb", ".log"} <= {path.suffix for path in files}
    assert SECRET not in text
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    command = wandb_files.run_config(directory)["provenance"]["command"]
    assert "updates=77 'gateway.api_key=<redacted>'" in command


def test_failing_media_do_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    metrics = MetricsLog(tmp_path / "metrics.jsonl", LoggerConfig(wandb="offline"), run_config={})
    metrics.media(1, lambda: 1 / 0)  # type: ignore[arg-type,return-value]
    metrics.write(1, {"x": 1.0})
    metrics.close()
    assert "ZeroDivisionError" in caplog.text
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["health/logger_errors"] == 1.0


def test_the_mode_of_the_environment_is_followed_unless_one_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    for mode, is_written in (("auto", False), ("offline", True)):
        directory = tmp_path / mode
        directory.mkdir()
        metrics = MetricsLog(directory / "metrics.jsonl", LoggerConfig(wandb=mode), run_config={})
        metrics.write(1, {"x": 1.0})
        metrics.close()
        assert metrics.url is None
        assert bool(list(directory.rglob("*.wandb"))) == is_written
        assert "health/logger_errors" not in (directory / "metrics.jsonl").read_text()
