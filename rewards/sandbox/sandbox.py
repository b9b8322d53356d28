"""Sandbox for Python programs that a model wrote.

Covered, in layers:
* always: everything is killed at the wall-clock limit, and when this process ends; an empty environment; limits on CPU
  time, memory, file size, open files and core dumps; output that is read up to a limit; no descriptor and no standard
  input of the trainer;
* where the system allows namespaces (`unshare`; tried once): no network, not even loopback; no view of other processes,
  and all of its own die with it, also those in sessions of their own; of the file system only the interpreter and
  system libraries, read-only, and one writable directory, which is in memory, bounded in bytes and files, and gone with
  the program, also when this process is killed; a limit on processes, not shared with other processes or sandboxes
  (Linux 5.14); no capabilities, no way to new privileges; as root: a user id of its own;
* without namespaces: a temporary directory that is removed at the end; the next sandbox in the same `TMPDIR` removes
  what a killed process left (unless that sandbox has namespaces, or another user).

Not covered: faults of the kernel; time that it takes from others below its limits; shared caches as side channels;
memory of all its processes together (`memory_mib` is for each), of System V segments, of `memfd_create`.
Without namespaces the program can read and write what the trainer's user can, fill the disk with many files, start any
number of processes, reach the network, and leave processes in sessions of their own. As root that is refused.

Not bubblewrap: it is rarely installed and bounds neither the number of files nor, as root, the number of processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import itertools
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from rollout.errors import ConfigError

JAIL = Path(__file__).with_name("jail.py")
FIRST_UID, NUM_UIDS = 0x7000_0000, 0x0FFE_0000
"""User ids for programs when this process is root, unused in systemd's table of user ids (docs/UIDS-GIDS.md)."""
PREFIX = "lockstep-sandbox-"
READ_ONLY = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache")
PROBE_TIMEOUT_S = 20.0


class Ended(StrEnum):
    """End of a program."""

    EXITED = "exited"
    """The program ended by itself, with any status."""
    TIMEOUT = "timeout"
    """The program was killed at the wall-clock limit."""
    KILLED = "killed"
    """A signal ended the program: a fault of its own, or the CPU limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one program and its children."""

    timeout_s: float = 5.0
    """Wall-clock time; the limit on CPU time is one second more."""
    memory_mib: int = 512
    file_mib: int = 16
    """Size of one written file."""
    disk_mib: int = 64
    """Size of all files together, in memory. In namespaces only."""
    processes: int = 16
    """Number of processes and threads. In namespaces only."""
    open_files: int = 64
    output_bytes: int = 64 * 2**10
    """Bytes of each output to keep; the rest is discarded."""

    def __post_init__(self) -> None:
        if min(dataclasses.astuple(self)) <= 0:
            raise ConfigError(f"sandbox: every limit must be positive, found {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """Result of a program."""

    ended: Ended
    status: int
    """Exit status, or minus the number of the signal."""
    stdout: str
    stderr: str


def run_python(source: str, *, stdin: str = "", limits: Limits | None = None) -> Execution:
    """Run a program in the sandbox; it can import the standard library only.

    Raises `ConfigError`: this process is root, and the system has no namespaces to contain the program.
    """
    limits = limits or Limits()
    isolated = has_namespaces()
    if os.geteuid() == 0 and not isolated:
        raise ConfigError(
            "code of a model is not run as root without namespaces; start the run as another user, or in a container "
            "that allows `unshare` (docker: --security-opt seccomp=unconfined --cap-add SYS_ADMIN)"
        )
    return _run(source, stdin, limits, isolated=isolated)


@functools.cache
def has_namespaces() -> bool:
    """True if the layers that need namespaces work here; tried by running a program in them."""
    if shutil.which("unshare") is None:
        return False
    result = _run("print(6 * 7)", "", Limits(timeout_s=PROBE_TIMEOUT_S), isolated=True)
    return result.stdout == "42\n"


@functools.cache
def _is_root_of_all() -> bool:
    """True if this process is root and may become any user, unlike root of a container with few user ids."""
    ranges = [[int(n) for n in line.split()] for line in Path("/proc/self/uid_map").read_text().splitlines()]
    has_uids = any(first <= FIRST_UID and first + count >= FIRST_UID + NUM_UIDS for first, _, count in ranges)
    return os.geteuid() == 0 and has_uids


@contextlib.contextmanager
def _directory() -> Iterator[str]:
    """Make a temporary directory, locked while its process lives; remove those whose process is gone."""
    for path in Path(tempfile.gettempdir()).glob(PREFIX + "*"):
        _remove_abandoned(path)
    while True:
        path = tempfile.mkdtemp(prefix=PREFIX)
        with contextlib.suppress(FileNotFoundError):  # before it is locked, other sandboxes take it for abandoned
            lock = os.open(path, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.isdir(path):
                break
            os.close(lock)
    try:
        yield path
    finally:
        _remove(path)
        os.close(lock)


def _remove_abandoned(path: Path) -> None:
    with contextlib.suppress(OSError):  # it belongs to another user, or was removed meanwhile
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(lock).st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(str(path))
        finally:
            os.close(lock)


def _remove(path: str) -> None:
    """Remove a tree, also directories whose permissions the program removed."""
    inside = (f"{parent}/{name}" for parent, names, _ in os.walk(path) for name in names)
    for directory in itertools.chain([path], inside):
        with contextlib.suppress(OSError):  # the program, or a process that it left, removed it
            if not os.path.islink(directory):
                os.chmod(directory, 0o700)
    shutil.rmtree(path, ignore_errors=True)


def _run(source: str, stdin: str, limits: Limits, *, isolated: bool) -> Execution:
    directory = contextlib.nullcontext("") if isolated else _directory()
    # The feed is a file without a name, which cannot be left behind.
    with directory as workdir, tempfile.TemporaryFile() as feed:
        becomes_another = isolated and _is_root_of_all()
        interpreter = os.path.realpath(sys.executable)
        settings = {
            "workdir": workdir,
            "binds": [*READ_ONLY, os.path.realpath(sys.base_prefix)],
            "disk_bytes": limits.disk_mib * 2**20 + 4 * (len(source) + len(stdin)),  # a character has up to 4 bytes
            "uids": [FIRST_UID, NUM_UIDS] if becomes_another else None,
            "files": {"program.py": source, "stdin": stdin},
            "command": [interpreter, "-I", "-B", "program.py"],
            "limits": {
                "RLIMIT_CPU": int(limits.timeout_s) + 1,
                "RLIMIT_AS": limits.memory_mib * 2**20,
                "RLIMIT_FSIZE": limits.file_mib * 2**20,
                "RLIMIT_NOFILE": limits.open_files,
                # Counted per user and user namespace. Without either, all processes of the trainer's user would count.
                **({"RLIMIT_NPROC": limits.processes} if isolated else {}),
                "RLIMIT_CORE": 0,
            },
        }
        feed.write(json.dumps(settings).encode())
        feed.seek(0)
        command = [interpreter, "-I", "-S", str(JAIL)]
        if isolated:
            user = [] if becomes_another else ["--user", "--map-root-user"]
            command = ["unshare", *user, "--net", "--pid", "--ipc", "--mount", "--fork", "--kill-child", *command]
        process = subprocess.Popen(
            command,
            stdin=feed,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
            # The namespaces end with `unshare`, which stays in the process group that is killed with a reward worker.
            start_new_session=not isolated,
            cwd="/",
        )
        try:
            stdout, stderr, in_time = _read(process, limits)
        finally:
            if isolated:
                process.kill()
            else:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
            for stream in (process.stdout, process.stderr):
                assert stream is not None
                stream.close()
    ended = Ended.TIMEOUT if not in_time else Ended.KILLED if status < 0 else Ended.EXITED
    return Execution(ended=ended, status=status, stdout=stdout, stderr=stderr)


def _read(process: subprocess.Popen[bytes], limits: Limits) -> tuple[str, str, bool]:
    """Return the beginnings of both outputs, and True if the process ended in time."""
    assert process.stdout is not None
    assert process.stderr is not None
    kept = {process.stdout: bytearray(), process.stderr: bytearray()}
    deadline = time.monotonic() + limits.timeout_s
    with selectors.DefaultSelector() as selector:
        for stream in kept:
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, selectors.EVENT_READ)
        # A descendant may hold the streams open after the program's end, hence poll.
        while selector.get_map() and process.poll() is None and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(min(left, 0.05)):
                _take(key.fileobj, kept, selector, limits)  # type: ignore[arg-type]
        in_time = True
        try:
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            in_time = False
        for key in list(selector.get_map().values()):
            _take(key.fileobj, kept, selector, limits)  # type: ignore[arg-type]
    stdout, stderr = (kept[stream].decode(errors="replace") for stream in (process.stdout, process.stderr))
    return stdout, stderr, in_time


def _take(stream, kept: dict, selector: selectors.BaseSelector, limits: Limits) -> None:
    try:
        chunk = os.read(stream.fileno(), 2**20)
    except BlockingIOError:
        return
    if not chunk:
        selector.unregister(stream)
    kept[stream] += chunk[: limits.output_bytes - len(kept[stream])]
