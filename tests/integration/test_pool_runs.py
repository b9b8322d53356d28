"""Whole runs on two ZeRO-3 ranks whose servers die, hang, restart, leave and join: they end with the same weights.

Fifty faults take half an hour:

    python -m pytest tests/integration/test_pool_runs.py -m "slow or not slow"
"""

from __future__ import annotations

import json
import random
import re
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fixtures.forked_servers import ForkedServers
from tests.fixtures.kills import differences
from tests.fixtures.runs import check_run, launch_run, run_directory
from tests.fixtures.servers import EngineServer, is_taken, send

pytestmark = [pytest.mark.engine, pytest.mark.distributed, pytest.mark.timeout(3600)]

CHANGES = ("sync/engines", "sync/requests_resent", "sync/canary", "user_files.json")
"""Beginnings of metrics that a fault may change, and a file that names the folder of its own run."""
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
        port = int(dead.url.rpartition(":")[2])
        while is_taken(port):  # a killed process holds it until its memory is freed
            time.sleep(0.05)
        self.servers[index] = self.start(port)

    def close(self) -> None:
        for server in self._started:
            server.stop()


class Run:
    """A run, followed by its metrics and its console."""

    def __init__(self, process: subprocess.Popen[str], directory: Path) -> None:
        self._process = process
        self._directory = directory

    @property
    def updates(self) -> int:
        metrics = run_directory(self._directory) / "metrics.jsonl"
        return metrics.read_text().count("reward/mean") if metrics.exists() else 0

    @property
    def step_s(self) -> float:
        """Median time of a step."""
        metrics = (run_directory(self._directory) / "metrics.jsonl").read_text()
        steps = [json.loads(line) for line in metrics.splitlines(keepends=True) if line.endswith("\n")]
        return statistics.median(step["time/step"] for step in steps if "reward/mean" in step)

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            assert self._process.poll() is None, "the run ended"
            time.sleep(0.02)

    def wait_for_words(self, words: str) -> str:
        """Return the console up to the line with these words."""
        console = ""
        while words not in console:
            line = self._process.stdout.readline() if self._process.stdout else ""
            assert line, f"the run ended without {words!r}: {console[-3000:]}"
            console += line
        return console

    def wait_for_updates(self, more: int) -> None:
        goal = self.updates + more
        self.wait_until(lambda: self.updates >= goal)


def finish(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate(timeout=1200)
    assert process.returncode == 0, output[-3000:] + errors[-6000:]
    return output + errors


def launch(fleet: Fleet, forked: ForkedServers, directory: Path, **settings: object) -> subprocess.Popen[str]:
    directory.mkdir()
    return launch_run([str(fleet.path)], forked.model, directory, **{**SETTINGS, **settings})


@pytest.fixture
def fleet(forked_servers: ForkedServers, tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(forked_servers, tmp_path, 3)
    try:
        yield fleet
    finally:
        fleet.close()


def changed(whole: Path, struck: Path) -> list[str]:
    found = differences(run_directory(whole), run_directory(struck))
    return [line for line in found if not any(name in line for name in CHANGES)]


def test_servers_that_die_restart_leave_and_join_change_nothing(
    fleet: Fleet, forked_servers: ForkedServers, tmp_path: Path
) -> None:
    updates = 8
    whole, struck = tmp_path / "whole", tmp_path / "struck"
    finish(launch(fleet, forked_servers, whole, updates=updates))
    process = launch(fleet, forked_servers, struck, updates=updates)
    run = Run(process, struck)
    run.wait_for_updates(1)
    fleet.strike(0, signal.SIGKILL)
    run.wait_for_updates(1)
    fleet.restart(0)
    fleet.strike(1, signal.SIGSTOP)
    run.wait_for_updates(1)
    fleet.strike(1, signal.SIGCONT)
    fleet.list(fleet.servers[:2])
    run.wait_for_updates(1)
    fleet.list(fleet.servers)
    said = finish(process)
    check_run(run_directory(struck), updates=updates)
    assert changed(whole, struck) == []
    for url, why in (
        (fleet.servers[0].url, ""),
        (fleet.servers[1].url, ""),
        (fleet.servers[2].url, "does not list it"),
    ):
        assert re.search(f"{re.escape(url)} is lost: .*{why}", said), said[-6000:]


def test_a_run_whose_servers_are_all_gone_waits_and_goes_on(
    fleet: Fleet, forked_servers: ForkedServers, tmp_path: Path
) -> None:
    whole, struck = tmp_path / "whole", tmp_path / "struck"
    finish(launch(fleet, forked_servers, whole, updates=4))
    process = launch(fleet, forked_servers, struck, updates=4)
    run = Run(process, struck)
    run.wait_for_updates(1)
    for index in range(3):
        fleet.strike(index, signal.SIGKILL)
    said = run.wait_for_words("waiting up to 600 s for a server of rollout.urls")
    assert "no engine is left" in said
    fleet.restart(1)
    said = finish(process)
    assert changed(whole, struck) == []
    assert f"the engine at {fleet.servers[1].url} joined with the weights of the run" in said


def test_a_driver_whose_only_server_is_lost_leaves_its_share_to_the_other(
    fleet: Fleet, forked_servers: ForkedServers, tmp_path: Path
) -> None:
    whole, struck = tmp_path / "whole", tmp_path / "struck"
    settings = {"rollout.urls": f"[{fleet.servers[0].url},{fleet.servers[1].url}]", "rollout.drivers": 2}
    finish(launch(fleet, forked_servers, whole, updates=6, **settings))
    process = launch(fleet, forked_servers, struck, updates=6, **settings)
    run = Run(process, struck)
    run.wait_for_updates(1)
    fleet.strike(1, signal.SIGKILL)
    run.wait_for_updates(1)
    fleet.restart(1)
    fleet.servers[1].wait_until_ready()
    fleet.strike(0, signal.SIGKILL)
    said = finish(process)
    assert changed(whole, struck) == []
    assert f"rank 1: the engine at {fleet.servers[1].url} is lost" in said


def test_asynchronous_rollouts_go_on(fleet: Fleet, forked_servers: ForkedServers, tmp_path: Path) -> None:
    process = launch(fleet, forked_servers, tmp_path / "struck", **{"updates": 6, "rollout.max_staleness": 1})
    run = Run(process, tmp_path / "struck")
    run.wait_for_updates(1)
    fleet.strike(0, signal.SIGKILL)
    run.wait_for_updates(1)
    fleet.strike(1, signal.SIGKILL)
    fleet.strike(2, signal.SIGKILL)
    fleet.restart(1)
    finish(process)
    lines = [
        json.loads(line) for line in (run_directory(tmp_path / "struck") / "metrics.jsonl").read_text().splitlines()
    ]
    lines = [line for line in lines if "reward/mean" in line]
    assert [line["step"] for line in lines] == list(range(1, 7))
    for line in lines:
        assert line["rollout/token_match_rate"] == 1.0
        assert line["rollout_correction/version_lag_max"] <= 1
        assert line["sync/canary_abs_diff"] < 1e-3


@pytest.mark.slow
def test_fifty_faults_change_nothing(fleet: Fleet, forked_servers: ForkedServers, tmp_path: Path) -> None:
    """One server at least is left alone at any time, so that the run need not wait for one."""
    faults, updates = 50, 160
    whole, struck = tmp_path / "whole", tmp_path / "struck"
    finish(launch(fleet, forked_servers, whole, updates=updates))
    process = launch(fleet, forked_servers, struck, updates=updates)
    run, moments = Run(process, struck), random.Random(0)
    run.wait_for_updates(1)
    is_down: dict[int, str] = {}
    for number in range(faults):
        time.sleep(moments.uniform(0.0, run.step_s))  # the moment of the fault, in any phase of a step
        index = number % 3
        if index in is_down:
            kind = is_down.pop(index)
            if kind == "killed":
                fleet.restart(index)
            elif kind == "stopped":
                fleet.strike(index, signal.SIGCONT)
            else:
                fleet.list([one for other, one in enumerate(fleet.servers) if is_down.get(other) != "removed"])
        elif len(is_down) < 2:
            is_down[index] = moments.choice(["killed", "stopped", "removed"])
            if is_down[index] == "removed":
                fleet.list([one for other, one in enumerate(fleet.servers) if is_down.get(other) != "removed"])
            else:
                fleet.strike(index, signal.SIGKILL if is_down[index] == "killed" else signal.SIGSTOP)
        run.wait_for_updates(1)
    finish(process)
    check_run(run_directory(struck), updates=updates)
    assert changed(whole, struck) == []
