"""Whole runs on two ZeRO-3 ranks whose servers die, hang, restart, leave and join: they end with the same weights.

Fifty faults take half an hour:

    python -m pytest tests/integration/test_pool_runs.py -m "slow or not slow"
"""

from __future__ import annotations

import random
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fixtures.forked_servers import ForkedServers
from tests.fixtures.kills import differences
from tests.fixtures.runs import check_run, launch_run, run_directory
from tests.fixtures.servers import EngineServer, send

pytestmark = [pytest.mark.engine, pytest.mark.distributed, pytest.mark.timeout(3600)]

CHANGES = ("sync/engines", "sync/requests_resent", "sync/canary")
"""Beginnings of metrics that a fault may change."""
SETTINGS = {"rollout.silence_timeout_s": 3, "sync.timeout_s": 30, "sync.bucket_mib": 0.25}


class Fleet:
    """Servers that are listed in a file, and a run that samples from them."""

    def __init__(self, forked: ForkedServers, directory: Path, count: int) -> None:
        self._forked = forked
        self._started: list[EngineServer] = []
        self.path = directory / "servers.txt"
        self.servers = [self.start() for _ in range(count)]
        for server in self.servers:
            server.wait_until_ready()
        self.list(self.servers)

    def start(self, port: int = 0) -> EngineServer:
        server = self._forked.start(port)
        self._started.append(server)
        return server

    def list(self, servers: list[EngineServer]) -> None:
        replacement = self.path.with_suffix(".new")
        replacement.write_text("".join(f"{server.url}\n" for server in servers))
        replacement.rename(self.path)

    def strike(self, index: int, number: signal.Signals) -> None:
        for pid in sorted(self.servers[index].pids):
            send(pid, number)

    def restart(self, index: int) -> None:
        """Start a server at the address of a dead one, without waiting for it."""
        dead = self.servers[index]
        dead.stop()
        self.servers[index] = self.start(int(dead.url.rpartition(":")[2]))

    def close(self) -> None:
        for server in self._started:
            server.stop()


class Run:
    """A run, followed by its metrics and its console."""

    def __init__(self, process: subprocess.Popen[str], directory: Path) -> None:
        self._process = process
        self._directory = directory
        self.log = directory / "output.log"

    @property
    def updates(self) -> int:
        metrics = run_directory(self._directory) / "metrics.jsonl"
        return metrics.read_text().count("reward/mean") if metrics.exists() else 0

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            assert self._process.poll() is None, "the run ended"
            time.sleep(0.02)

    def wait_for_updates(self, more: int) -> None:
        goal = self.updates + more
        self.wait_until(lambda: self.updates >= goal)


def finish(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate(timeout=1200)
    assert process.returncode == 0, output[-3000:] + errors[-6000:]
    return output + errors
