"""Hosts: environments in another interpreter, which may hang, die or lie."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from lockstep.rollout.errors import ConfigError, EnvironmentFault
from lockstep.rollout.hosts.process import Host, host, interpreter
from tests.fixtures.paths import FIXTURES, ROOT

PROGRAM = FIXTURES / "host_programs" / "answers_program.py"


@pytest.fixture
def running() -> Iterator[Host]:
    one = host(sys.executable, PROGRAM)
    yield one
    one.end()


def ends(pid: int) -> bool:
    """Wait for the end of a process. Return False if it lives for 10 s."""
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.05)
    return not os.path.exists(f"/proc/{pid}")


async def test_requests_are_answered_and_prints_of_the_package_do_not_disturb(running: Host):
    assert await running.ask("echo", timeout_s=30, text="ü\n\ud800") == {"text": "ü\n\ud800"}
    slow, fast = await asyncio.gather(
        running.ask("later", timeout_s=30, seconds=0.3), running.ask("later", timeout_s=30, seconds=0.0)
    )
    assert (slow, fast) == (0.3, 0.0)
    assert host(sys.executable, PROGRAM) is running


async def test_an_error_of_the_environment_or_its_settings_is_typed_and_the_host_goes_on(running: Host):
    with pytest.raises(EnvironmentFault, match="answers_program: ValueError: a bug of the environment"):
        await running.ask("raise", timeout_s=30)
    with pytest.raises(ConfigError, match="answers_program: no such game"):
        await running.ask("setting", timeout_s=30)
    assert await running.ask("echo", timeout_s=30) == {}


async def test_a_host_that_hangs_is_ended_at_the_deadline_with_all_that_wait_and_another_is_started(running: Host):
    assert await running.ask("echo", timeout_s=30) == {}
    started = time.monotonic()
    other = asyncio.create_task(running.ask("later", timeout_s=30, seconds=20))
    await asyncio.sleep(0.1)
    with pytest.raises(EnvironmentFault, match=r"no answer to 'hang' in 0.5 s.*raise environment.settings.timeout_s"):
        await running.ask("hang", timeout_s=0.5)
    with pytest.raises(EnvironmentFault, match="its process ended"):
        await other
    assert time.monotonic() - started < 10
    again = host(sys.executable, PROGRAM)
    assert again is not running
    assert await again.ask("echo", timeout_s=30) == {}
    again.end()


async def test_a_host_that_dies_fails_its_requests_with_its_last_words(running: Host):
    with pytest.raises(EnvironmentFault, match=r"its process ended with status 3"):
        await running.ask("die", timeout_s=30)
    with pytest.raises(EnvironmentFault, match=r"status 3: out of memory, say"):
        await running.ask("echo", timeout_s=30)


async def test_a_host_that_lies_is_ended(running: Host):
    with pytest.raises(EnvironmentFault, match="its process ended"):
        await running.ask("lie", timeout_s=30, fd=3)


async def test_a_full_pipe_does_not_block_the_event_loop(running: Host):
    assert await running.ask("echo", timeout_s=30) == {}
    # A write that blocks would end when the host's 60 s of sleep do, after the deadline.
    hung = asyncio.create_task(running.ask("hang", timeout_s=20))
    await asyncio.sleep(0.1)
    others = [asyncio.create_task(running.ask("echo", timeout_s=120, text="x" * 10_000)) for _ in range(100)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in (hung, *others))
    running.end()
    results = await asyncio.gather(hung, *others, return_exceptions=True)
    assert {type(result) for result in results} == {EnvironmentFault}


def test_a_host_ends_with_the_process_that_started_it():
    program = (
        "import asyncio, os, pathlib, sys; from lockstep.rollout.hosts.process import host; "
        f"one = host(sys.executable, pathlib.Path('{PROGRAM}')); asyncio.run(one.ask('echo', timeout_s=30)); "
        "print(one._process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ends(int(done.stdout))


async def test_programs_that_a_host_started_end_with_it(running: Host):
    pid = await running.ask("start", timeout_s=30)
    assert os.path.exists(f"/proc/{pid}")
    running.end()
    assert ends(pid)


def test_an_interpreter_that_is_not_there_is_refused():
    assert interpreter(None) == sys.executable
    with pytest.raises(ConfigError, match=r"settings.python=/no/python is not a program"):
        interpreter("/no/python")
