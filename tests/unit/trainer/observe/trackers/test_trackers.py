"""Trackers with their real packages, read back with each package's own reader: names, repeated updates, failures."""

from __future__ import annotations

import json
import logging
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lockstep.trainer.config.groups.outputs_settings import LoggerConfig
from lockstep.trainer.observe.metrics_log import MetricsLog
from lockstep.trainer.observe.trackers import background, tensorboard_run
from lockstep.trainer.observe.trackers.background import KINDS
from lockstep.trainer.observe.trackers.tracker import Histogram, Medium, Page, Place, Session, Table, Values
from lockstep.trainer.observe.trackers.wandb_run import Lineage

NAMES = ("rollout_correction/kl", "eval/pass_at_1", "reward/mean")
Series = dict[str, dict[int, float]]


def read_tensorboard(directory: Path) -> Series:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory / "trackers" / "tensorboard"))
    events.Reload()
    return {name: {event.step: event.value for event in events.Scalars(name)} for name in events.Tags()["scalars"]}


def read_mlflow(directory: Path) -> Series:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{directory}/trackers/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("lockstep")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["optimizer.lr"] == "0.5"
    histories = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    assert all(len({point.step for point in points}) == len(points) for points in histories.values()), "none twice"
    return {name: {point.step: point.value for point in points} for name, points in histories.items()}


def read_trackio(directory: Path) -> Series:
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = SQLiteStorage.get_runs("lockstep")
    series: Series = {}
    for row in SQLiteStorage.get_logs("lockstep", run):
        for name, value in row.items():
            if isinstance(value, int | float) and name != "step":
                assert row["step"] not in series.setdefault(name, {}), "none twice"
                series[name][row["step"]] = value
    return series


READERS: dict[str, Callable[[Path], Series]] = {
    "tensorboard": read_tensorboard,
    "mlflow": read_mlflow,
    "trackio": read_trackio,
}


def media() -> dict[str, Medium]:
    return {
        "media/rollouts": Table(columns=("turns", "reward"), rows=[["a | <b>\nc", 1.0], ["d", None]]),
        "media/token_view": Page(html="<!DOCTYPE html><p>tokens</p>"),
        "histograms/log_ratio": Histogram(counts=np.array([1, 2]), edges=np.array([0.0, 1.0, 2.0])),
    }


def log_updates(directory: Path, names: list[str], updates: range, lineage: Lineage | None, offset: float) -> None:
    config = LoggerConfig(**dict.fromkeys(names, True))
    metrics = MetricsLog(directory / "metrics.jsonl", config, run_config={"optimizer": {"lr": 0.5}}, lineage=lineage)
    for update in updates:
        metrics.write(update, {**dict.fromkeys(NAMES, update + offset), "value/undefined": float("nan")})
        metrics.media(update, media)
    metrics.close()


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    run = tmp_path / "mine"
    run.mkdir()
    return run


@pytest.mark.parametrize("name", READERS)
def test_names_and_values_arrive_as_they_are_and_a_resumed_run_is_continued(
    name: str, directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip(name)
    if name == "trackio":  # it reads its directory when it is imported
        from trackio import sqlite_storage

        monkeypatch.setattr(sqlite_storage, "TRACKIO_DIR", directory)
    monkeypatch.setattr(background, "FINISH_S", 250.0)  # a busy machine
    log_updates(directory, [name], range(4), None, offset=0.5)
    log_updates(directory, [name], range(3, 6), Lineage(run_id="a", update=2), offset=100.5)
    assert not caplog.records
    found = READERS[name](directory)
    assert set(found) == set(NAMES)
    repeated = 3.5 if KINDS[name].keeps_first else 103.5
    for series in found.values():
        assert series == {0: 0.5, 1: 1.5, 2: 2.5, 3: repeated, 4: 104.5, 5: 105.5}


def test_media_that_tensorboard_cannot_show_are_left_out(directory: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log_updates(directory, ["tensorboard"], range(1), None, offset=0.0)
    events = accumulator.EventAccumulator(str(directory / "trackers" / "tensorboard"))
    events.Reload()
    assert events.Tags()["histograms"] == ["histograms/log_ratio"]
    (text,) = events.Tensors("media/rollouts/text_summary")
    assert b"a &#124; &lt;b><br>c" in text.tensor_proto.string_val[0]
    assert not [tag for tag in events.Tags()["tensors"] if "token_view" in tag]


def test_an_offline_run_of_swanlab_has_the_names(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("swanlab")
    monkeypatch.delenv("SWANLAB_MODE", raising=False)
    log_updates(directory, ["swanlab"], range(2), None, offset=0.5)
    files = [path for path in (directory / "trackers" / "swanlab").rglob("*") if path.is_file()]
    content = b"".join(path.read_bytes() for path in files)
    for name in NAMES:
        assert name.encode() in content


class Made:
    """A tracker in memory that waits or fails."""

    label = "Made"
    shows = (Table,)
    keeps_first = True
    seen: list[tuple[int, Values]]
    failed: bool | None
    delay_s = 0.0
    fails_at = ""

    def __init__(self, session: Session) -> None:
        self.id = session.id or "one"
        Made.seen, Made.failed = [], None
        self._do("open")

    @staticmethod
    def place(settings: LoggerConfig, directory: Path) -> Place:
        return Place(data="there", view="look")

    def log(self, update: int, values: Values) -> None:
        self._do("log")
        Made.seen.append((update, values))

    def finish(self, *, failed: bool) -> None:
        Made.failed = failed
        self._do("finish")

    def _do(self, call: str) -> None:
        time.sleep(self.delay_s)
        if call == self.fails_at:
            raise (SystemExit if call == "open" else ValueError)("quota exceeded")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> type[Made]:
    monkeypatch.setattr(tensorboard_run, "TensorBoardRun", Made)
    monkeypatch.setattr(Made, "delay_s", 0.0)
    monkeypatch.setattr(Made, "fails_at", "")
    return Made


def opened(directory: Path) -> MetricsLog:
    return MetricsLog(directory / "metrics.jsonl", LoggerConfig(tensorboard=True), run_config={})


@pytest.mark.parametrize(("where", "count"), [("open", 1), ("log", 3), ("finish", 1)])
def test_a_failing_tracker_gives_one_warning_and_a_count(
    where: str, count: int, directory: Path, made: type[Made], caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(made, "fails_at", where)
    with caplog.at_level(logging.WARNING):
        metrics = opened(directory)
        for update in range(3):
            metrics.write(update, {"x": 1.0})
        metrics.close()
        metrics._trackers = {}
        metrics.write(3, {"x": 1.0})
    assert len(caplog.records) == 1
    assert "Made failed" in caplog.text
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["x"] for line in lines] == [1.0] * 4
    assert lines[-1]["health/logger_errors"] == count


def test_a_slow_tracker_delays_neither_the_run_nor_its_end(
    directory: Path, made: type[Made], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(made, "delay_s", 15.0)
    monkeypatch.setattr(background, "FINISH_S", 0.1)
    started = time.monotonic()
    metrics = opened(directory)
    metrics.write(1, {"x": 1.0})
    metrics.close()
    assert time.monotonic() - started < 12
    assert "did not take all of its data" in caplog.text


def test_a_tracker_that_is_far_behind_loses_data_with_a_warning(
    directory: Path, made: type[Made], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(made, "delay_s", 1.0)
    monkeypatch.setattr(background, "WAITING", 2)
    metrics = opened(directory)
    for update in range(5):
        metrics.write(update, {"x": 1.0})
    metrics.close()
    assert "2 calls wait for it" in caplog.text or "calls wait" in caplog.text
    assert len(caplog.records) == 1


def test_a_tracker_is_told_of_a_failed_run_and_gets_only_media_it_shows(directory: Path, made: type[Made]) -> None:
    metrics = opened(directory)
    metrics.media(1, media)
    try:
        raise RuntimeError
    except RuntimeError:
        metrics.close()
    assert made.failed is True
    assert [list(values) for _, values in made.seen] == [["media/rollouts"]]
    assert metrics.places == {"Made": "look  # data: there"}


def test_another_store_is_another_run(directory: Path, made: type[Made], monkeypatch: pytest.MonkeyPatch) -> None:
    for update, store, expected in ((1, "a", [1]), (1, "a", []), (1, "b", [1])):
        monkeypatch.setattr(made, "place", staticmethod(lambda *_, s=store: Place(data="x", view="", store=s)))
        metrics = opened(directory)
        metrics.write(update, {"x": 1.0})
        metrics.close()
        assert [update for update, _ in made.seen] == expected


def test_several_trackers_get_the_same(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tensorboard", "mlflow"):
        pytest.importorskip(name)
    monkeypatch.setattr(background, "FINISH_S", 250.0)
    log_updates(directory, ["tensorboard", "mlflow"], range(3), None, offset=0.5)
    assert read_tensorboard(directory) == read_mlflow(directory)
    with sqlite3.connect(directory / "trackers" / "mlflow" / "mlflow.db") as database:
        assert database.execute("select count(*) from runs").fetchone() == (1,)
