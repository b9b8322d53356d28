"""The table of runs: links, names, states, alarms, deleted runs."""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from lockstep.lab.watch.run_table import RunTable
from lockstep.trainer.config.schema import Config
from tests.unit.lab.pages.test_run_report import line, write_run

HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "..%2f..%2fetc",
    "a\nb\x1b[31m",
    os.fsdecode(b"\xff\xfe"),
    "x" * 200,
    "'\";--",
]


def rows(root: Path, deadline: float = math.inf) -> list[dict[str, Any]]:
    return RunTable(root).rows(deadline)["runs"]


def row(root: Path) -> dict[str, Any]:
    (only,) = rows(root)
    return only


def write(root: Path, *lines: dict[str, Any], name: str = "run", **settings: Any) -> Path:
    return write_run(root / name, list(lines), [], Config(**settings))


class TestWhichRuns:
    def test_a_link_to_a_run_is_not_a_second_run(self, tmp_path: Path):
        write(tmp_path, line(1))
        (tmp_path / "latest").symlink_to("run")
        assert row(tmp_path)["name"] == "run"

    def test_nothing_outside_of_the_folder_is_shown(self, tmp_path: Path):
        write(tmp_path / "elsewhere", line(1), name="secret")
        root = tmp_path / "runs"
        root.mkdir()
        (root / "linked").symlink_to(tmp_path / "elsewhere/secret")
        assert rows(root) == []
        run = write(root, line(1))
        (run / "metrics.jsonl").unlink()
        (run / "metrics.jsonl").symlink_to(tmp_path / "elsewhere/secret/metrics.jsonl")
        assert row(root)["reward"] is None
        table = RunTable(root)
        table.rows(math.inf)
        (linked,) = table.runs.values()
        assert table.refresh_columns([linked], math.inf) == 1, "there is nothing to read"
        assert linked.columns.extent(hours=False) is None
        (run / "rollouts").rmdir()
        (run / "rollouts").symlink_to(tmp_path)
        with pytest.raises(OSError, match="is a link"):
            linked.inside("rollouts", "step-000001.jsonl")

    @pytest.mark.parametrize("name", ["run", "latest"])
    def test_one_run_can_be_watched_also_by_its_link(self, tmp_path: Path, name: str):
        write(tmp_path, line(1))
        (tmp_path / "latest").symlink_to("run")
        assert row(tmp_path / name)["name"] == "run"

    def test_runs_and_folders_of_runs_can_be_watched_together(self, tmp_path: Path):
        for folder, name in (("one", "a"), ("one", "b"), ("one", "c"), ("two", "a")):
            write(tmp_path / folder, line(1), name=name)
        (tmp_path / "one/latest").symlink_to("b")

        def names(*roots: str) -> set[str]:
            found = RunTable(*(tmp_path / root for root in roots)).rows(math.inf)["runs"]
            assert len({run["id"] for run in found}) == len(found)
            return {run["name"] for run in found}

        assert names("one/a", "one/latest") == {"a", "b"}
        assert names("one/a", "two/a") == {"one/a", "two/a"}
        assert names("one", "two") == {"one/a", "one/b", "one/c", "two/a"}
        assert names("one", "one/a") == {"a", "b", "c"}
        assert RunTable(tmp_path / "one").rows(math.inf)["root"] == str(tmp_path / "one")

    def test_names_may_hold_anything(self, tmp_path: Path):
        for name in HOSTILE:
            write(tmp_path, line(1), name=name)
        found = rows(tmp_path)
        assert len({one["id"] for one in found}) == len(HOSTILE)
        assert all(one["id"].isalnum() for one in found)
        json.dumps(found).encode()
        assert all("\x1b" not in one["name"] and len(one["name"]) <= 120 for one in found)

    def test_a_deleted_run_is_gone_and_a_new_one_appears(self, tmp_path: Path):
        table = RunTable(tmp_path)
        assert table.rows(math.inf)["runs"] == []
        run = write(tmp_path, line(1))
        assert len(table.rows(math.inf)["runs"]) == 1
        (watched,) = table.runs.values()
        shutil.rmtree(run)
        assert table.refresh_columns([watched], math.inf) == 1
        assert table.rows(math.inf)["runs"] == []

    def test_a_run_that_is_still_there_keeps_its_columns(self, tmp_path: Path):
        write(tmp_path, line(1))
        table = RunTable(tmp_path)
        table.rows(math.inf)
        (before,) = table.runs.values()
        table.rows(math.inf)
        assert list(table.runs.values()) == [before]


class TestRow:
    def test_numbers_are_the_newest(self, tmp_path: Path):
        write(tmp_path, line(1, **{"eval/reward_mean": 0.25}), line(2, **{"perf/tokens_per_s": 7.0}), updates=9)
        found = row(tmp_path)
        assert (found["update"], found["updates"]) == (2, 9)
        assert (found["reward"], found["heldOut"], found["speed"]) == (0.1, 0.25, 7.0)

    def test_only_the_end_of_a_long_file_is_read(self, tmp_path: Path):
        run = write(tmp_path, line(1))
        with (run / "metrics.jsonl").open("a") as file:
            file.write("x" * 400_000 + "\n" + json.dumps(line(2)) + "\n" + '{"step": 3, "torn')
        assert row(tmp_path)["update"] == 2

    def test_states(self, tmp_path: Path):
        now = time.time()
        run = write(tmp_path, line(1, **{"time/unix": now}), updates=2)
        assert row(tmp_path)["state"] == "running"
        (run / "metrics.jsonl").write_text(json.dumps(line(1, **{"time/unix": now - 600})) + "\n")
        assert row(tmp_path)["state"] == "stopped"
        with (run / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            assert row(tmp_path)["state"] == "running"
        (run / "metrics.jsonl").write_text(json.dumps(line(1, **{"time/unix": now - 600, "time/step": 300.0})) + "\n")
        assert row(tmp_path)["state"] == "running", "a step takes as long"
        (run / "metrics.jsonl").write_text(json.dumps(line(2, **{"time/unix": now - 600})) + "\n")
        assert row(tmp_path)["state"] == "finished"

    def test_a_run_without_a_step_is_shown(self, tmp_path: Path):
        write(tmp_path, updates=5)
        found = row(tmp_path)
        assert (found["update"], found["updates"], found["alarms"]) == (None, 5, [])


class TestAlarms:
    def test_they_are_those_of_the_newest_step_with_the_thresholds_of_the_run(self, tmp_path: Path):
        write(tmp_path, line(1, **{"rollout/token_match_rate": 0.5}), line(2, **{"rollout_correction/kl": 0.25}))
        (alarm,) = row(tmp_path)["alarms"]
        assert alarm.startswith("|rollout_correction/kl| is 0.25, above 0.1")
        config = tmp_path / "run/config.yaml"
        assert "alarm_kl: 0.1" in config.read_text()
        config.write_text(config.read_text().replace("alarm_kl: 0.1", "alarm_kl: 0.5"))
        assert row(tmp_path)["alarms"] == []

    def test_a_number_that_is_not_finite_is_one(self, tmp_path: Path):
        write(tmp_path, line(1, **{"rollout_correction/kl": None}))
        assert "not finite" in row(tmp_path)["alarms"][0]

    def test_solved_prompts_are_good_news(self, tmp_path: Path):
        solved = {"reward/mean": 1.0, "reward/std": 0.0, "reward/zero_std_fraction": 1.0}
        write(tmp_path, line(1, **solved, **{"reward/flat_solved_fraction": 1.0}))
        found = row(tmp_path)
        assert found["alarms"] == []
        assert "Harder data" in found["notes"][0]

    @pytest.mark.parametrize(
        "text", ["a: ${oc.env:HOME}", "x: &a [1]\ny: *a", "[", "correction: {alarm_kl: many}", None]
    )
    def test_settings_that_cannot_be_read_are_named(self, tmp_path: Path, text: str | None):
        run = write(tmp_path, line(1))
        (run / "config.yaml").unlink()
        if text is not None:
            (run / "config.yaml").write_text(text)
        (alarm,) = row(tmp_path)["alarms"]
        assert "config.yaml" in alarm or "alarm_kl" in alarm


def test_the_table_does_not_wait_for_settings(tmp_path: Path):
    for number in range(3):
        write(tmp_path, line(1), name=f"run-{number}", updates=7)
    table = RunTable(tmp_path)
    first = table.rows(-math.inf)
    assert not first["isComplete"]
    assert [one["reward"] for one in first["runs"]] == [0.05] * 3
    whole = table.rows(math.inf)
    assert whole["isComplete"]
    assert [one["updates"] for one in whole["runs"]] == [7] * 3
