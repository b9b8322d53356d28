"""Heartbeats, stacks of hanging stages, and the wall-clock limit."""

from __future__ import annotations

import json
import os
import subprocess
import textwrap

from lockstep.trainer.run.heartbeat import Heartbeat, WallTime
from tests.fixtures.forked_python import forked_python


def test_a_heartbeat_holds_stage_and_update_of_a_rank(tmp_path):
    heart = Heartbeat(tmp_path, rank=1, step_timeout_s=0.0)
    heart.beat("step", update=3)
    line = json.loads((tmp_path / "heartbeat" / "rank-1.json").read_text())
    assert (line["rank"], line["pid"], line["update"], line["stage"]) == (1, os.getpid(), 3, "step")
    heart.beat("checkpoint", update=3)
    assert json.loads((tmp_path / "heartbeat" / "rank-1.json").read_text())["stage"] == "checkpoint"
    heart.close()


HANGS = """
    import sys, time
    from pathlib import Path
    from lockstep.trainer.run.heartbeat import Heartbeat
    def waits_forever():
        sum(range(10**8))
    heart = Heartbeat(Path(sys.argv[1]), rank=0, step_timeout_s=0.3)
    heart.beat("step", update=1)
    waits_forever()
    heart.close()
"""


def test_a_stage_past_its_deadline_writes_its_stacks(tmp_path):
    subprocess.run([forked_python(), "-c", textwrap.dedent(HANGS), str(tmp_path)], check=True)
    assert "waits_forever" in (tmp_path / "logs" / "stacks-rank-0.txt").read_text()


def test_a_stage_past_its_deadline_ends_the_run_if_configured(tmp_path):
    ends = textwrap.dedent(HANGS).replace("step_timeout_s=0.3", "step_timeout_s=1.0, ends_run=True")
    ends = ends.replace("sum(range(10**8))", "time.sleep(100)")
    done = subprocess.run([forked_python(), "-c", ends, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "waits_forever" in (tmp_path / "logs" / "stacks-rank-0.txt").read_text()
    assert "step of update 1 has taken 1 s, so the run ends" in done.stderr
    assert "resume=auto" in done.stderr


def test_a_stage_that_holds_the_interpreter_lock_ends_too(tmp_path):
    ends = textwrap.dedent(HANGS).replace("step_timeout_s=0.3", "step_timeout_s=0.3, ends_run=True")
    ends = ends.replace("10**8", "10**14")  # in C, for days
    done = subprocess.run([forked_python(), "-c", ends, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "waits_forever" in (tmp_path / "logs" / "stacks-rank-0.txt").read_text()


def test_the_wall_clock_limit_expires():
    assert not WallTime(0.0).is_over
    assert not WallTime(1.0).is_over
    assert WallTime(1e-12).is_over
