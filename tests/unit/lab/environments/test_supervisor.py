"""The process around an examination: it ends what hangs, and says what ran. Small programs stand in."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from lockstep.lab.environments import supervisor
from lockstep.lab.environments.supervisor import supervise
from tests.fixtures.paths import ROOT
from tests.fixtures.processes import wait_until_gone

BEGINNING = """
import faulthandler, os, signal, sys, time
from lockstep.lab.finding import Finding
from lockstep.lab.environments.journal import Journal
faulthandler.register(signal.SIGUSR1)
journal = Journal(os.fdopen(int(sys.argv[-1]), "w"))
journal.add(Finding(check="first", measured="1"))
"""


@pytest.fixture
def outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Return a function that supervises a program; it returns the exit status, the output and the errors."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(supervisor, "GRACE_S", 0.2)
    monkeypatch.setattr(supervisor, "DUMP_S", 0.3)

    def run(body: str, *, as_json: bool = False) -> tuple[int, str, str]:
        file = tmp_path / "examination.py"
        file.write_text(BEGINNING + body)
        status = supervise([sys.executable, str(file)], ["x"], as_json=as_json, user_file=str(file))
        return status, *capsys.readouterr()

    return run


def test_findings_are_lines_and_sentences(outcome):
    status, shown, _ = outcome("journal.done()")
    assert status == 0
    assert shown == f"{'first':<40} ok    1\n\n1 of 1 checks passed\n"


def test_a_failure_is_exit_status_1_and_json_has_all_of_it(outcome):
    body = (
        "from lockstep.lab.finding import failure\njournal.add(failure('second', 'It is wrong.', '2'))\njournal.done()"
    )
    status, shown, _ = outcome(body, as_json=True)
    assert status == 1
    found = json.loads(shown)
    assert not found["ok"]
    assert found["findings"][1] == {"check": "second", "verdict": "FAILS", "measured": "2", "sentence": "It is wrong."}


def test_a_call_that_blocks_is_killed_in_time_and_named_with_its_line(outcome):
    body = (
        "def step():\n    time.sleep(1000)\n"
        "with journal.doing('Game.step after an empty turn', limit_s=0.3):\n    step()\n"
    )
    started = time.monotonic()
    status, shown, _ = outcome(body)
    assert status == 1
    assert time.monotonic() - started < 30
    line = (BEGINNING + body).splitlines().index("    time.sleep(1000)") + 1
    assert (
        f"Game.step after an empty turn did not return and blocked all episodes (line {line} of examination.py" in shown
    )


def test_no_process_is_left(outcome, tmp_path):
    body = (
        "import subprocess\n"
        f"child = subprocess.Popen(['sleep', '1000']); open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "with journal.doing('it', limit_s=0.3):\n    time.sleep(1000)\n"
    )
    assert outcome(body)[0] == 1
    wait_until_gone([int((tmp_path / "pid").read_text())])


@pytest.mark.parametrize(("code", "ended"), [("os._exit(0)", "exit status 0"), ("os.kill(os.getpid(), 9)", "signal 9")])
def test_a_process_that_ends_itself_is_a_verdict(outcome, code, ended):
    body = f"print('last words', flush=True)\nwith journal.doing('Game.reset', limit_s=9):\n    {code}\n"
    status, shown, _ = outcome(body)
    assert status == 1
    assert f"the process ended with {ended} during Game.reset." in shown
    assert "last words" in shown


def test_a_wrong_setting_is_exit_status_2_with_its_sentence_only(outcome):
    body = "print('noise')\nprint('lockstep: x=1 is not a setting', file=sys.stderr)\nsys.exit(2)"
    status, _, errors = outcome(body)
    assert status == 2
    assert errors == "lockstep: x=1 is not a setting\n"


def test_descriptors_are_closed(outcome):
    before = set(os.listdir("/proc/self/fd"))
    outcome("journal.done()")
    assert set(os.listdir("/proc/self/fd")) == before
