"""Lines on long work in log files."""

from __future__ import annotations

import io
import re
import time

import pytest
from rich.console import Console

from lockstep.trainer.observe import progress
from lockstep.trainer.observe.console import RunConsole
from tests.unit.rewards.workers.test_pool import rollout


def console(*, is_terminal: bool) -> tuple[RunConsole, io.StringIO]:
    run, stream = RunConsole(enabled=True, total_updates=80), io.StringIO()
    run._console = Console(file=stream, force_terminal=is_terminal, width=100, highlight=False, color_system=None)
    return run, stream


def test_long_stages_are_not_silent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(progress, "EVERY_S", 0.05)
    run, stream = console(is_terminal=False)
    with run.progress("update 3", 64) as lines:
        lines.stage("rollout")
        lines.rollout(rollout("a"))
        time.sleep(0.2)
        lines.stage("score")
        time.sleep(0.2)
    said = stream.getvalue().splitlines()
    assert re.fullmatch(r"\.\.\. update 3: rollout for 0 s; 1 of 64 rollouts, \d+ tokens sampled", said[0])
    assert said[-1].startswith("... update 3: score for 0 s")
    time.sleep(0.15)
    assert stream.getvalue().splitlines() == said, "nothing after the end"


def test_work_shorter_than_half_a_minute_prints_nothing():
    run, stream = console(is_terminal=False)
    assert progress.EVERY_S == 30
    with run.progress("evaluation", 4) as lines:
        lines.stage("rollout")
    assert stream.getvalue() == ""


def test_beside_bars_there_are_no_lines(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(progress, "EVERY_S", 0.05)
    run, stream = console(is_terminal=True)
    run.begin(0)
    with run.progress("update 1", 4):
        time.sleep(0.2)
    run.end()
    assert "..." not in stream.getvalue()
