"""Sandboxes in containers, with a stand-in for Docker's client (`tests/fixtures/docker.py`)."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.integrations.environments.sandbox import SandboxEnvironment
from lockstep.integrations.sandbox.containers import container_enclosure, container_problem, docker_run
from lockstep.rollout.environments import make_environment
from lockstep.rollout.errors import SandboxError
from lockstep.rollout.records import RolloutStatus
from lockstep.rollout.sandbox.execution import Ended, Language, Limits
from lockstep.rollout.sandbox.program_session import Session, SessionSandbox, tool_call
from tests.fixtures.docker import commands, install
from tests.fixtures.paths import ROOT
from tests.fixtures.policies import play
from tests.fixtures.policies import tool_call as written_call
from tests.unit.integrations.environments.test_sandbox import results, script
from tests.unit.rollout.sandbox.test_program_session import launchers, mark
from tests.unit.rollout.sandbox.test_sandbox import named, processes, wait_until

LIMITS = Limits(timeout_s=5.0, memory_mib=300, disk_mib=8, processes=10, output_bytes=1000)
UNSHARE = ["unshare", "--user", "--map-root-user", "--net", "--ipc", "--mount", "--pid", "--fork", "true"]
needs_unshare = pytest.mark.skipif(
    subprocess.run(UNSHARE, capture_output=True).returncode != 0, reason="this system allows no user namespaces"
)


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the stand-in, which is first on the PATH."""
    install(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def environment(**settings: Any) -> SandboxEnvironment:
    made = make_environment("sandbox", sandbox="docker", image="python:3.12-slim", **settings)
    assert isinstance(made, SandboxEnvironment)
    return made


def test_the_command_has_all_walls():
    command = docker_run("docker", "python:3.12-slim", LIMITS, "lockstep-sandbox-1")
    words = " ".join(command[: command.index("-c")])
    assert words == (
        "docker run --rm --interactive --read-only --name lockstep-sandbox-1 --pull never --log-driver none "
        "--network none --ipc none --memory 372m --memory-swap 372m --pids-limit 11 --cap-drop ALL "
        "--security-opt no-new-privileges --user 65534:65534 --workdir / --entrypoint python3 "
        "--tmpfs /sandbox:rw,exec,nosuid,nodev,mode=700,uid=65534,gid=65534,size=8388608,nr_inodes=2048 "
        "--tmpfs /call:rw,exec,nosuid,nodev,mode=700,uid=65534,gid=65534,size=4194304,nr_inodes=1024 "
        "python:3.12-slim -I -S"
    )
    assert command[-2] == "-c"
    assert len(command[-1]) < 2**17  # MAX_ARG_STRLEN of Linux
    compile(command[-1], "process_1", "exec")


@needs_unshare
class TestContainers:
    async def test_whole_episodes_are_played(self, docker):
        before = launchers()
        made = environment(timeout_s=5.0)
        assert await made.problem() is None
        rollout = await play(
            made,
            script(
                written_call("python", code="import os\nopen('f', 'w').write('7')\nprint(os.getcwd())"),
                written_call("shell", command="cat f; echo $HOME; sleep 60 & exit 3"),
                written_call("python", code="import os\nprint(sorted(os.listdir('.')))"),
                "Done.",
            ),
        )
        assert (rollout.status, rollout.error) == (RolloutStatus.COMPLETED, None)
        assert results(rollout) == ["exit status 0\n/sandbox", "exit status 3\n7/sandbox", "exit status 0\n['f']"]
        assert launchers() == before
        names = [words[words.index("--name") + 1] for words in commands(docker) if words[0] == "run"]
        removed = [words[-1] for words in commands(docker) if words[0] == "rm"]
        assert removed == names
        assert len(set(names)) == 2
        assert all(words[:2] == ["rm", "--force"] for words in commands(docker) if words[0] == "rm")

    def test_processes_do_not_stay_and_limits_hold(self, docker):
        session = Session(container_enclosure("docker", "a", LIMITS))

        def run(text: str, timeout_s: float = 5.0):
            call = tool_call(session.enclosure, Language.PYTHON, text)
            return session.run(call, timeout_s=timeout_s, output_bytes=LIMITS.output_bytes)

        name = mark("d")
        run(named(name) + "if os.fork() == 0:\n    os.setsid()\n    time.sleep(60)")
        assert processes(name) == 0
        assert run("while True: pass", 1.0).ended is Ended.TIMEOUT
        assert "MemoryError" in run("bytearray(2**30)").stderr
        assert run("print('x' * 2000)").is_cut
        assert "No space left" in run("for n in range(10): open(f'{n}', 'wb').write(b'x' * 2**20)").stderr
        assert "unreachable" in run("import socket\nsocket.create_connection(('1.1.1.1', 53), 2)").stderr
        assert run("import os\nos.kill(1, 9)\nprint('on')").stdout == "on\n"
        session.close()

    async def test_a_canceled_episode_removes_its_container(self, docker):
        before, name = launchers(), mark("q")
        calls = script(written_call("python", code=named(name) + "time.sleep(60)"))
        task = asyncio.create_task(play(environment(timeout_s=60.0), calls))
        await asyncio.to_thread(wait_until, lambda: processes(name) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (processes(name), launchers()) == (0, before)
        assert commands(docker)[-1][0] == "rm"

    @pytest.mark.parametrize("state", ["killed", "exit"])
    def test_the_end_of_the_trainer_ends_the_container(self, docker, state):
        """A killed trainer closes the container's input; one that ends removes the container."""
        name = mark("k")
        trainer = (
            "import sys, threading, time\n"
            "from lockstep.integrations.sandbox.containers import container_enclosure\n"
            "from lockstep.rollout.sandbox.execution import Language, Limits\n"
            "from lockstep.rollout.sandbox.program_session import Session, tool_call\n"
            "session = Session(container_enclosure('docker', 'a', Limits(timeout_s=60)))\n"
            "call = tool_call(session.enclosure, Language.PYTHON, sys.argv[1])\n"
            "work = lambda: session.run(call, timeout_s=60, output_bytes=9)\n"
            "threading.Thread(target=work, daemon=True).start()\n"
            "time.sleep(3 if sys.argv[2] == 'exit' else 60)\n"
        )
        command = [sys.executable, "-c", trainer, named(name) + "time.sleep(60)", state]
        process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)})
        wait_until(lambda: processes(name) == 1)
        if state == "killed":
            process.kill()
        process.wait()
        wait_until(lambda: processes(name) == 0)
        assert (commands(docker)[-1][0] == "rm") == (state == "exit")

    async def test_a_container_that_dies_costs_the_rollout(self, docker, monkeypatch):
        monkeypatch.setenv("FAKE_DOCKER", "dies")
        rollout = await play(environment(), script(written_call("shell", command="ls")))
        assert rollout.status is RolloutStatus.FAILED
        assert "a container of python:3.12-slim did not run a program of the model" in str(rollout.error)
        assert "did not run" in str(await environment().problem())


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("daemon", "docker cannot look for images (Cannot connect to the Docker daemon at"),
        ("image", "environment.settings.image=python:3.12-slim is not on this machine"),
    ],
)
async def test_a_missing_daemon_or_image_is_found_before_the_run(docker, monkeypatch, fault, sentence):
    monkeypatch.setenv("FAKE_DOCKER", fault)
    before = launchers()
    problem = await environment().problem()
    assert sentence in str(problem)
    if fault == "image":
        assert "type: docker pull python:3.12-slim" in str(problem)
    with pytest.raises(SandboxError, match=r"a container of .* did not run a program of the model: "):
        await SessionSandbox.open(lambda: container_enclosure("docker", "python:3.12-slim", LIMITS))
    assert launchers() == before


async def test_a_missing_program_is_found_before_the_run(tmp_path):
    problem = container_problem(str(tmp_path / "no-docker"), "a")
    assert "no-docker is not a program; install Docker, or set another" in str(problem)
    with pytest.raises(SandboxError, match="No such file"):
        Session(container_enclosure(str(tmp_path / "no-docker"), "a", LIMITS))


def test_a_daemon_that_hangs_is_found_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("lockstep.integrations.sandbox.containers.COMMAND_TIMEOUT_S", 0.5)
    program = tmp_path / "docker"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    assert "did not end" in str(container_problem(str(program), "a"))
