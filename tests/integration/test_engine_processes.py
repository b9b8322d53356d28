"""Processes of an engine: Ctrl-C does not reach them, and they do not outlive their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.processes import descendants, is_alive, wait_until_gone

pytestmark = [pytest.mark.engine, pytest.mark.distributed]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen]:
    directory = tmp_path_factory.mktemp("parent")
    with (directory / "stderr").open("w+") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.orphan_parent", str(directory)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")  # imports may write before the engine redirects output
        assert "ready\n" in lines, (directory / "stderr").read_text()[-3000:]
        yield process
        process.kill()
        process.wait()


def test_ctrl_c_in_the_terminal_does_not_reach_the_engine(parent: subprocess.Popen) -> None:
    os.killpg(parent.pid, signal.SIGINT)  # as a terminal does: to the whole foreground group
    time.sleep(1)

    assert parent.stdin is not None
    assert parent.stdout is not None
    parent.stdin.write("sample\n")
    parent.stdin.flush()
    assert parent.stdout.readline() == "4\n"


def test_a_killed_parent_leaves_no_engine_process(parent: subprocess.Popen) -> None:
    processes = descendants(parent.pid) - {parent.pid}
    assert processes, "the engine runs in a process of its own"

    parent.send_signal(signal.SIGKILL)
    parent.wait()
    try:
        wait_until_gone(processes, timeout_s=15)
    finally:
        for pid in filter(is_alive, processes):
            os.kill(pid, signal.SIGKILL)
