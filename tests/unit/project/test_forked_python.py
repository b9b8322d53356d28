"""Notes of forks: each ends with its fork, because ids of processes come again within a run of tests."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fixtures.forked_python import fork_of, forked_python
from tests.fixtures.processes import wait_until_gone

SLEEPS = "import time; time.sleep(600)"


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(lambda client, fork: client.kill(), id="a killed client"),
        pytest.param(lambda client, fork: os.kill(fork, signal.SIGKILL), id="a killed fork"),
        pytest.param(lambda client, fork: client.terminate(), id="a client that passes its signal on"),
    ],
)
def test_the_note_of_a_fork_ends_with_it(end: Callable[[subprocess.Popen[bytes], int], None]) -> None:
    client = subprocess.Popen([forked_python(), "-c", SLEEPS])
    fork = fork_of(client)
    note = Path(forked_python()).parent / str(client.pid)
    assert note.read_text() == str(fork)
    end(client, fork)
    client.wait()
    wait_until_gone([fork])
    subprocess.run([forked_python(), "-c", "pass"], check=True)  # after it the server has seen the end of the fork
    assert not note.exists()
