"""Sandbox in a container of Docker, or of a program that takes its arguments.

Process 1 of the container is `process_1.py`, given as an argument, so the image needs Python 3.9 and nothing of
Lockstep, and the daemon may be on another machine. It reads the calls from the container's standard input, which the
daemon closes when this process is gone; then it ends, and the daemon removes the container.

Covered: no network, no capabilities, no new privileges, a read-only image, writable directories in memory, limits on
memory and processes of the container together, and those of `process_1.py` for each program.
Not covered: faults of the kernel or of the daemon. The daemon is trusted, and so is the image.
"""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from lockstep.rollout.sandbox.execution import Limits
from lockstep.rollout.sandbox.program_session import Enclosure
from lockstep.rollout.sandbox.sandbox import PLACE, PLACE_BYTES, PREFIX, PROCESS_1, WORKDIR, common_limits
from lockstep.rollout.sandbox.system_calls import refusing_filter

PYTHON = "python3"
PATH = "/usr/local/bin:/usr/bin:/bin"
UID = 65534
"""An unprivileged user. The container counts its processes, so all containers may have the same."""
OWN_MIB = 64
"""Memory of process 1 and for the kernel, beside that of one program and its files."""
START_TIMEOUT_S = 60.0
COMMAND_TIMEOUT_S = 30.0


def docker_run(program: str, image: str, limits: Limits, name: str) -> list[str]:
    """Return the command that runs process 1 in a container of this name."""
    memory = f"{limits.memory_mib + limits.disk_mib + OWN_MIB}m"
    flags = {
        "--name": name,
        "--pull": "never",
        "--log-driver": "none",  # the log would hold all outputs, on the host's disk
        "--network": "none",
        "--ipc": "none",  # and no /dev/shm, which is writable
        "--memory": memory,
        "--memory-swap": memory,  # with memory: no swap
        "--pids-limit": str(limits.processes + 1),
        "--cap-drop": "ALL",
        "--security-opt": "no-new-privileges",
        "--user": f"{UID}:{UID}",
        "--workdir": "/",
        "--entrypoint": PYTHON,
    }
    directories = {WORKDIR: limits.disk_mib * 2**20, PLACE: PLACE_BYTES}
    tmpfs = [word for path, size in directories.items() for word in ("--tmpfs", f"{path}:{_options(size)}")]
    words = [word for flag in flags.items() for word in flag]
    return [
        *(program, "run", "--rm", "--interactive", "--read-only", *words, *tmpfs),
        *(image, "-I", "-S", "-c", PROCESS_1.read_text(encoding="utf-8")),
    ]


def _options(size: int) -> str:
    return f"rw,exec,nosuid,nodev,mode=700,uid={UID},gid={UID},size={size},nr_inodes={size // 4096}"


def container_enclosure(program: str, image: str, limits: Limits) -> Enclosure:
    """Return the walls of a new container."""
    name = PREFIX + secrets.token_hex(8)

    def remove(_: subprocess.Popen[bytes]) -> None:
        # Killing the client would leave the container to the end of its input.
        with suppress(OSError, subprocess.TimeoutExpired):
            _docker(program, "rm", "--force", name)

    return Enclosure(
        command=docker_run(program, image, limits, name),
        env=dict(os.environ),  # DOCKER_HOST and others are for the client; the container gets none of them
        settings={
            "workdir": WORKDIR,
            "place": PLACE,
            "limits": common_limits(limits),
            "filter": refusing_filter().hex(),
        },
        limits=limits,
        start_timeout_s=START_TIMEOUT_S,
        refused=lambda reason: f"a container of {image} did not run a program of the model: {reason}",
        python=PYTHON,
        path=PATH,
        stop=remove,
        has_own_group=True,
    )


def container_problem(program: str, image: str) -> str | None:
    """Return the reason why no container of this image can be started, as a sentence, or None."""
    try:
        result = _docker(program, "image", "inspect", "--format", "{{.Id}}", image)
    except FileNotFoundError:
        return f"environment.settings.docker_program={program} is not a program; install Docker, or set another"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"environment sandbox: `{program} image inspect {image}` did not end: {error}; start the daemon"
    if result.returncode == 0:
        return None
    lines = result.stderr.decode(errors="replace").strip().splitlines()
    reason = lines[-1] if lines else f"status {result.returncode}"
    if "no such image" in reason.lower():
        return f"environment.settings.image={image} is not on this machine ({reason}); type: {program} pull {image}"
    return (
        f"environment sandbox: {program} cannot look for images ({reason}); start the daemon, or set "
        "environment.settings.sandbox=local"
    )


def _docker(program: str, *words: str) -> subprocess.CompletedProcess[bytes]:
    command: Sequence[str] = (program, *words)
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=COMMAND_TIMEOUT_S)
