"""Metrics of a run: failing loggers, damaged files, lines after a resumed checkpoint."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

import pytest
import wandb

from lockstep.rollout.errors import ConfigError, DataError
from lockstep.trainer.config.groups.outputs_settings import LoggerConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.observe import metrics_log
from lockstep.trainer.observe.metrics_log import BATCH, MetricsLog, read_metrics

TORN = '{"step": 4, "reward/me'


class Failing:
    """A W&B run whose method `where` fails."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.summary: dict[str, str] = {}

    def __getattr__(self, name: str):
        def call(*args: object, **kwargs: object) -> None:
            if name == self.where:
                raise RuntimeError("quota exceeded")

        return call


@pytest.mark.parametrize("where", ["init", "define_metric", "log", "finish"])
def test_a_failing_wandb_gives_one_warning_and_a_count(tmp_path, monkeypatch, caplog, where):
    def init(**_: object) -> Failing:
        if where == "init":
            raise RuntimeError("quota exceeded")
        return Failing(where)

    monkeypatch.setattr(wandb, "init", init)
    with caplog.at_level(logging.WARNING):
        metrics = MetricsLog(tmp_path / "metrics.jsonl", LoggerConfig(wandb="online"), run_config={})
        for step in range(3):
            metrics.write(step, {"x": 1.0})
        metrics.close()
    assert [record.message.count("quota exceeded") for record in caplog.records] == [1]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["x"] for line in lines] == [1.0] * 3
    expected = {"init": 1.0, "define_metric": 1.0, "log": 2.0, "finish": None}[where]
    assert lines[-1].get("health/logger_errors") == expected


def test_a_metrics_file_that_cannot_be_written_does_not_end_the_run(tmp_path, caplog):
    metrics = MetricsLog(tmp_path / "none" / "metrics.jsonl", LoggerConfig(), run_config={})
    metrics.write(1, {"x": 1.0})
    metrics.write(2, {"x": 1.0})
    assert len(caplog.records) == 1


def test_lines_of_metrics_after_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [
        {"step": 1, BATCH: 1},
        {"step": 1, BATCH: 2},
        {"step": 2, BATCH: 3},
        {"step": 2, BATCH: 4},
        {"step": 3, BATCH: 5},
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"step": 4, "roll')
    log = MetricsLog(path, Config().logger, run_config={})
    log.truncate_after(update=2, batch=3)
    assert [json.loads(line) for line in path.read_text().splitlines()] == lines[:3]
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')  # written by a version without batches
    log.truncate_after(update=2, batch=9)
    assert len(path.read_text().splitlines()) == 2


def test_a_torn_last_line_is_ignored(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    for torn in (TORN, "{", TORN + "\n", "\0" * 512):
        path.write_text(f'{{"step": 1}}\n{{"step": 2, "a": null}}\n{torn}')
        assert read_metrics(path) == [{"step": 1}, {"step": 2, "a": None}]
    path.write_text(TORN)
    assert read_metrics(path) == []


def test_a_last_line_without_newline_is_read(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]


@pytest.mark.parametrize("damaged", [TORN, "5", "{}", "[]", '"step"', "", "[" * 100_000])
def test_an_earlier_damaged_line_is_an_error_with_its_number(tmp_path: Path, damaged: str):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{damaged}\n{{"step": 3}}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:2 is not a line of metrics"):
        read_metrics(path)


def test_a_missing_file_is_refused_with_an_example(tmp_path: Path):
    with pytest.raises(ConfigError, match="for example runs/latest"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_a_damaged_file_does_not_stop_a_resume(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\xff{"st\n{"step": 2}\n' + TORN.encode())
    MetricsLog(path, Config().logger, run_config={}).truncate_after(update=2, batch=2)
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]


def test_every_line_has_the_time(tmp_path: Path):
    metrics = MetricsLog(tmp_path / "metrics.jsonl", LoggerConfig(), run_config={})
    before = time.time()
    metrics.write(1, {})
    metrics.write(2, {})
    first, second = read_metrics(tmp_path / "metrics.jsonl")
    assert before <= first["time/unix"] <= second["time/unix"] <= time.time()
    assert 0 < first["time/run"] <= second["time/run"] < 1e6


def test_the_time_of_a_run_begins_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ages = iter([100.0, 107.5])
    monkeypatch.setattr(metrics_log, "_process_seconds", lambda: next(ages))
    monkeypatch.setattr(metrics_log, "_before_run", 0.0)
    metrics_log.begin_run()
    assert metrics_log.run_seconds() == 7.5
