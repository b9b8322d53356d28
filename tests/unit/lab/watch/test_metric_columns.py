"""Columns of metrics.jsonl: growth, resumes, damage, buckets."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest

from lockstep.lab.watch import metric_columns
from lockstep.lab.watch.metric_columns import Grid, MetricColumns, bucketed

EVER = math.inf


def line(step: int, **more: float | None) -> str:
    return json.dumps({"step": step, "reward/mean": step / 10, **more}) + "\n"


def read(path: Path) -> MetricColumns:
    columns = MetricColumns(path)
    columns.refresh(EVER)
    return columns


def means(columns: MetricColumns, name: str, last: int, *, hours: bool = False) -> list[float]:
    """One bucket a step."""
    series = columns.series(name, Grid(start=1, width=1, count=last), hours=hours)
    assert series is not None
    return [round(float(value), 5) for value in series[0]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "metrics.jsonl"
    file.write_text(line(1) + line(2))
    return file


class TestGrowth:
    def test_only_appended_lines_are_read(self, path: Path, monkeypatch: pytest.MonkeyPatch):
        columns = read(path)
        taken: list[int] = []
        add = MetricColumns.add
        monkeypatch.setattr(MetricColumns, "add", lambda self, lines: (taken.append(len(lines)), add(self, lines))[1])
        assert not columns.refresh(EVER)
        with path.open("a") as file:
            file.write(line(3))
        assert columns.refresh(EVER)
        assert taken == [1]
        assert means(columns, "reward/mean", 3) == [0.1, 0.2, 0.3]

    def test_a_line_that_is_being_written_waits_for_its_end(self, path: Path):
        columns = read(path)
        whole = line(3)
        with path.open("a") as file:
            file.write(whole[:15])
        assert not columns.refresh(EVER)
        with path.open("a") as file:
            file.write(whole[15:])
        assert columns.refresh(EVER)
        assert columns.num_damaged == 0
        assert means(columns, "reward/mean", 3) == [0.1, 0.2, 0.3]

    def test_a_metric_that_begins_late_has_nothing_before(self, path: Path):
        columns = read(path)
        with path.open("a") as file:
            file.writelines(line(step, **{f"own/{n}": step for n in range(70)}) for step in range(3, 1500))
        columns.refresh(EVER)
        assert np.isnan(means(columns, "own/69", 3)[:2]).all()
        assert means(columns, "own/69", 1499)[-1] == 1499

    def test_it_stops_at_the_deadline_and_goes_on_from_there(self, path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(metric_columns, "CHUNK", 100)
        path.write_text("".join(map(line, range(1, 30))))
        now = iter(range(100))
        monkeypatch.setattr(metric_columns.time, "monotonic", lambda: next(now))
        columns = MetricColumns(path)
        columns.refresh(2)
        assert 0 < columns.read_share < 1
        columns.refresh(1000)
        assert columns.read_share == 1
        assert columns.num_lines == 29


class TestReplaced:
    def test_a_resume_that_cuts_the_file_is_seen(self, path: Path):
        columns = read(path)
        fresh = path.with_suffix(".new")
        fresh.write_text(line(1))
        fresh.replace(path)
        assert columns.refresh(EVER)
        assert means(columns, "reward/mean", 2)[0] == 0.1
        assert np.isnan(means(columns, "reward/mean", 2)[1])

    def test_another_file_that_is_longer_and_has_the_same_inode_is_seen(self, path: Path):
        columns = read(path)
        inode = path.stat().st_ino
        path.write_text("".join(line(step, **{"reward/mean": 0.5}) for step in range(1, 9)))
        assert path.stat().st_ino == inode
        columns.refresh(EVER)
        assert means(columns, "reward/mean", 8) == [0.5] * 8

    def test_a_deleted_file_raises(self, path: Path):
        columns = read(path)
        path.unlink()
        with pytest.raises(OSError, match="No such file"):
            columns.refresh(EVER)

    def test_a_pipe_is_refused(self, tmp_path: Path):
        os.mkfifo(tmp_path / "metrics.jsonl")
        with pytest.raises(OSError, match="not a regular file"):
            read(tmp_path / "metrics.jsonl")


class TestDamage:
    @pytest.mark.parametrize(
        "bad",
        ["garbage", "[1]", '{"step": -1}', '{"reward/mean": 1}', '{"step": 3, "a": "text"}', "[" * 5000, "\x00\xff"],
    )
    def test_a_damaged_line_is_counted_and_left_out(self, path: Path, bad: str):
        with path.open("a") as file:
            file.write(bad + "\n" + line(3))
        columns = read(path)
        assert columns.num_damaged == 1
        assert means(columns, "reward/mean", 3) == [0.1, 0.2, 0.3]

    def test_a_huge_line_is_left_out_without_being_held(self, path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(metric_columns, "CHUNK", 200)
        with path.open("a") as file:
            file.write('{"step": 3, "a": "' + "x" * 2000 + '"}\n' + line(4))
        columns = read(path)
        assert columns.num_damaged == 1
        assert means(columns, "reward/mean", 4)[3] == 0.4

    def test_numbers_that_are_not_finite_are_gaps_and_missing_ones_are_not(self, path: Path):
        with path.open("a") as file:
            file.write('{"step": 3, "reward/mean": NaN}\n{"step": 4, "reward/mean": -Infinity}\n{"step": 5}\n')
            file.write('{"step": 6, "reward/mean": null}\n{"step": 7, "reward/mean": 1e99}\n')
        found = means(read(path), "reward/mean", 7)
        assert found[2:4] == [math.inf, math.inf]
        assert math.isnan(found[4])
        assert found[5:] == [math.inf, math.inf]


class TestBuckets:
    def test_mean_smallest_and_largest_of_each_bucket(self):
        x, y = np.arange(1.0, 9.0), np.array([1, 2, 3, np.inf, np.nan, np.nan, np.inf, np.nan], np.float32)
        found = bucketed(x, y, Grid(start=0, width=2, count=6))
        expected = [
            [1, 1, 1],
            [2.5, 2, 3],
            [np.inf, np.nan, np.nan],
            [np.inf, np.nan, np.nan],
            [np.nan] * 3,
            [np.nan] * 3,
        ]
        np.testing.assert_array_equal(found.T, expected)

    def test_buckets_outside_of_the_numbers_are_empty(self):
        x, y = np.array([5.0, 6.0]), np.array([1, 2], np.float32)
        assert np.isnan(bucketed(x, y, Grid(start=8, width=1, count=3))).all()
        assert np.isnan(bucketed(x, y, Grid(start=0, width=1, count=3))).all()
        assert bucketed(x, y, Grid(start=4, width=1, count=4))[0].tolist()[1:3] == [1, 2]

    @pytest.mark.parametrize(("low", "high"), [(1, 10_000), (0, 0), (17, 18), (1, 2**53)])
    def test_a_grid_covers_its_ends_with_few_buckets_of_whole_width(self, low: float, high: float):
        grid = Grid.over(low, high, points=300, is_whole=True)
        assert grid.start <= low
        assert grid.edges[-1] > high
        assert grid.count <= 302
        assert grid.width == int(grid.width)

    def test_the_grid_stays_while_a_run_grows(self):
        grids = [Grid.over(1, last, points=300, is_whole=True) for last in range(600, 1000)]
        assert len({(grid.start, grid.width) for grid in grids}) == 2

    def test_a_spike_stays_in_the_band(self, tmp_path: Path):
        path = tmp_path / "metrics.jsonl"
        path.write_text("".join(line(step, **{"reward/mean": float(step == 500)}) for step in range(1, 1001)))
        series = read(path).series("reward/mean", Grid.over(1, 1000, points=10, is_whole=True), hours=False)
        assert series is not None
        assert np.nanmax(series[2]) == 1
        assert np.nanmax(series[0]) == pytest.approx(1 / 128, rel=0.1)

    def test_steps_that_go_back_are_sorted(self, path: Path):
        path.write_text(line(3) + line(1) + line(2))
        assert means(read(path), "reward/mean", 3) == [0.1, 0.2, 0.3]


def test_hours_go_on_after_a_resume(path: Path):
    path.write_text("".join(line(1, **{"time/run": 3600.0 * age}) for age in (1, 2, 1, 2)))
    columns = read(path)
    assert columns.extent(hours=True) == (1, 4)
    assert columns.extent(hours=False) == (1, 1)
    assert means(columns, "reward/mean", 4, hours=True) == [0.1] * 4


def test_a_large_file_is_sampled_first(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(metric_columns, "PREVIEW_BYTES", 10_000)
    path.write_text("".join(map(line, range(1, 1001))))
    columns = MetricColumns(path)
    columns.refresh(-EVER)
    assert columns.num_lines == 0
    assert columns.extent(hours=False) == pytest.approx((1, 1000), abs=20)
    sampled = columns.series("reward/mean", Grid(start=1, width=100, count=10), hours=False)
    assert sampled is not None
    np.testing.assert_allclose(sampled[0], np.arange(5, 105, 10), atol=1)
    columns.refresh(EVER)
    assert columns.extent(hours=False) == (1, 1000)
    assert columns.num_lines == 1000
