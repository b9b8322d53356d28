"""Killed and running runs: every tool reads the complete data, and reports the damaged."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.lab.pages.run_report import report
from lockstep.lab.pages.saved_run import SavedRun
from lockstep.lab.replay import checkpoints_up_to, saved_step
from lockstep.rollout.errors import ConfigError, DataError
from lockstep.rollout.records import Rollout
from lockstep.rollout.saved_rollouts import read_newest_rollouts, read_rollouts, write_rollouts
from lockstep.trainer.observe.metrics_log import BATCH, read_metrics
from tests.fixtures.forked_python import forked_python
from tests.fixtures.paths import ROOT
from tests.unit.lab.pages.test_run_report import line, rollout, write_run

TORN = '{"step": 4, "reward/me'


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three updates, and rollouts of the third."""
    lines = [line(update, **{BATCH: float(update)}) for update in (1, 2, 3)]
    return write_run(tmp_path / "run", lines, [rollout(i, float(i % 2)) for i in range(4)])


def tool(*arguments: object) -> tuple[int, str]:
    done = subprocess.run(
        [forked_python(), *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout + done.stderr


class TestRolloutFilesAreAtomic:
    def test_a_file_being_written_is_not_read(self, tmp_path: Path):
        path = tmp_path / "step-000001.jsonl"

        def slowly() -> Iterator[Rollout]:
            yield rollout(0, 1.0)
            assert read_newest_rollouts(tmp_path) == (None, [], [])

        write_rollouts(path, slowly())
        assert list(tmp_path.iterdir()) == [path]
        assert read_newest_rollouts(tmp_path) == (path, [rollout(0, 1.0)], [])

    def test_a_failed_write_leaves_only_the_older_file(self, tmp_path: Path):
        path = tmp_path / "step-000001.jsonl"
        write_rollouts(path, [rollout(0, 1.0)])

        def full_disk() -> Iterator[Rollout]:
            yield rollout(1, 1.0)
            raise OSError("no space left on device")

        with pytest.raises(OSError, match="no space"):
            write_rollouts(path, full_disk())
        assert list(read_rollouts(path)) == [rollout(0, 1.0)]
        assert list(tmp_path.iterdir()) == [path]

    def test_a_kill_leaves_a_partial_file_that_is_not_read(self, tmp_path: Path):
        path = tmp_path / "step-000001.jsonl"

        def killed() -> Iterator[Rollout]:
            for number in range(1000):
                yield rollout(number, 1.0)
            os._exit(0)

        child = os.fork()
        if not child:
            write_rollouts(path, killed())
        os.waitpid(child, 0)
        assert [left.name for left in tmp_path.iterdir()] == ["step-000001.jsonl.partial"]
        assert read_newest_rollouts(tmp_path) == (None, [], [])
        write_rollouts(path, [rollout(0, 1.0)])  # the resumed run makes the update again
        assert list(tmp_path.iterdir()) == [path]


class TestTools:
    def test_all_tools_read_a_run_with_a_torn_last_line(self, run: Path):
        with (run / "metrics.jsonl").open("a") as file:
            file.write(TORN)
        status, said = tool("scripts/inspect_run.py", run)
        assert status == 0, said
        assert "update 3" in said
        status, said = tool("scripts/plot.py", run)
        assert status == 0, said
        assert len(SavedRun.read(run).lines) == 3
        assert saved_step(run, 3).num_steps == 2
        assert read_metrics(run / "metrics.jsonl")[-1]["step"] == 3

    def test_a_line_without_the_number_of_its_batch_is_not_replayed(self, run: Path):
        (run / "metrics.jsonl").write_text(json.dumps(line(3) | {BATCH: None}) + "\n")
        with pytest.raises(ConfigError, match="no line for update 3"):
            saved_step(run, 3)

    def test_checkpoints_of_a_step_are_found_at_once_whatever_its_number(self, run: Path):
        for name in ("step-2", "step-10", "step-007", "step-x", "step-²"):
            (run / "checkpoints" / name).mkdir(parents=True)
        assert [number for number, _ in checkpoints_up_to(run, 10**17)] == [10, 2]
        assert [number for number, _ in checkpoints_up_to(run, 9)] == [2]

    def test_all_tools_name_an_earlier_damaged_line(self, run: Path):
        lines = (run / "metrics.jsonl").read_text().splitlines()
        (run / "metrics.jsonl").write_text("\n".join([lines[0], TORN, lines[2]]))
        for script in ("inspect_run", "plot", "report"):
            status, said = tool(f"scripts/{script}.py", run)
            assert status == 1, said
            assert "metrics.jsonl:2 is not a line of metrics" in said
        for read in (lambda: saved_step(run, 3), lambda: read_metrics(run / "metrics.jsonl")):
            with pytest.raises(DataError, match=r"metrics\.jsonl:2"):
                read()

    def test_tools_fall_back_to_the_newest_complete_rollouts_and_report_it(self, run: Path):
        """Older versions may have left partial files under the final name."""
        third = run / "rollouts" / "step-000003.jsonl"
        (run / "rollouts" / "step-000004.jsonl").write_text(third.read_text()[:-20])
        (run / "rollouts" / "step-000005.jsonl").write_text("")
        status, said = tool("scripts/report.py", run)
        assert status == 0, said
        assert "step-000005.jsonl is empty; the page has older rollouts" in said
        assert "step-000004.jsonl:4 is not a saved rollout" in said
        page = report(SavedRun.read(run))
        assert "Rollouts of update 3" in page
        assert "step-000004.jsonl:4 is not a saved rollout" in page
        status, said = tool("scripts/inspect_run.py", run)
        assert status == 0, said
        assert "step-000004.jsonl:4 is not a saved rollout" in said
        assert "update 3" in said

    def test_a_run_without_complete_rollouts_has_a_report(self, run: Path):
        (run / "rollouts" / "step-000003.jsonl").write_text(json.dumps({"rollout_id": 0})[:-2])
        page = report(SavedRun.read(run))
        assert "step-000003.jsonl:1 is not a saved rollout" in page
        assert "Rollouts of update" not in page

    def test_rollouts_of_an_untrained_step_are_shown(self, run: Path):
        (run / "rollouts" / "step-000003.jsonl").rename(run / "rollouts" / "step-000003-untrained-4.jsonl")
        status, said = tool("scripts/inspect_run.py", run)
        assert status == 0, said

    def test_names_of_metrics_cannot_control_the_terminal_or_be_markup(self, run: Path):
        odd = line(3, **{"environment/[/b]x": 1.0, "environment/\x1b[2J": 2.0, "environment/\ud800": 3.0})
        (run / "metrics.jsonl").write_text(json.dumps(odd))
        status, said = tool("scripts/inspect_run.py", run.rename(run.with_name("[bold]run")))
        assert status == 0, said
        assert "[bold]run, update 3" in said
        assert "environment/[/b]x" in said
        assert "environment/\\x1b[2J" in said
        assert "\x1b" not in said
