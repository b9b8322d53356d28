"""Processes that end with their parent, also when it is killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from tests.fixtures.paths import ROOT

CHILD = """
import sys, time
from lockstep.rollout.system.orphan_guard import exit_when_orphaned
exit_when_orphaned(message="the launcher is gone")
print("watching", flush=True)
time.sleep(60)
"""
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}])
print(child.pid, flush=True)
child.wait()
"""


def test_a_process_ends_with_a_message_when_its_parent_is_killed() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    assert parent.stderr is not None
    child = int(parent.stdout.readline())
    assert parent.stdout.readline() == "watching\n"
    parent.kill()
    assert "lockstep: the launcher is gone" in parent.stderr.read(), "read until the child closes it"
    deadline = time.monotonic() + 20
    while _is_running(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"
