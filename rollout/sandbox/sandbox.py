"""Sandbox for Python programs that a model wrote.

Covered, in layers:
* always: everything is killed at the wall-clock limit, and when this process ends; an empty environment; limits on CPU
  time, memory, file size, open files and core dumps; output that is read up to a limit; no descriptor, no standard
  input and no kernel keyring of the trainer; if memory runs out, the kernel takes the program before the trainer;
* in namespaces: no network, not even loopback; no view of other processes, no signals to them, and all of its own die
  with it, also those in sessions of their own, before `run_python` returns; of the file system only the interpreter and
  system libraries, read-only, and one writable directory, which is in memory, bounded in bytes and files, and gone with
  the program, also when this process is killed; a limit on processes, not shared with other processes or sandboxes
  (Linux 5.14); no capabilities, no way to new privileges; as root: a user id of its own; no system calls that get
  around these (`rollout/sandbox/system_calls.py`).

Without namespaces no program runs, unless the caller says `unsafe`. Then only the first layer holds: the program can
read and write what the trainer's user can, also its environment and memory, signal its processes, fill the disk with
many files, start any number of processes, reach the network, and leave processes in sessions of their own. What a
killed process left in its temporary directory is removed by the next sandbox in the same `TMPDIR`, if it is unsafe and
has the same user. As root that is refused.

Not covered: faults of the kernel; time that it takes from others below its limits; shared caches as side channels;
memory of all its processes together (`memory_mib` is for each), and of the kernel for their pipes, sockets and locks.

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
import select
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
from typing import IO

from rollout.errors import ConfigError, SandboxError
from rollout.sandbox.system_calls import refusing_filter

JAIL = Path(__file__).with_name("jail.py")
FIRST_UID, NUM_UIDS = 0x7000_0000, 0x0FFE_0000
"""User ids for programs when this process is root, unused in systemd's table of user ids (docs/UIDS-GIDS.md)."""
PREFIX = "lockstep-sandbox-"
READ_ONLY = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache")
START_TIMEOUT_S = 20.0
"""Limit for building the sandbox, apart from the program's own."""
STOP_TIMEOUT_S = 5.0
"""Time for the launcher to end all processes before it is killed itself."""


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
    is_cut: bool = False
    """True if the program printed more on its standard output than was kept."""


def run_python(source: str, *, stdin: str = "", limits: Limits | None = None, unsafe: bool = False) -> Execution:
    """Run a program in the sandbox; it can import the standard library only.

    unsafe: run it without namespaces, with the rights of this process. Raises:
        SandboxError: the program was not started; the system may not allow namespaces.
        ConfigError: the program would run without namespaces as root.
    """
    if unsafe and os.geteuid() == 0:
        raise ConfigError(
            "code of a model is not run as root without isolation, found unsafe=true; leave it out, or start the run "
            "as another user"
        )
    return _run(source, stdin, limits or Limits(), isolated=not unsafe)


def isolation_problem() -> str | None:
    """Return the reason why this system cannot isolate programs, or None; tried by running one."""
    try:
        result = run_python("print(6 * 7)", limits=Limits(timeout_s=START_TIMEOUT_S))
    except SandboxError as error:
        return str(error)
    return None if result.stdout == "42\n" else f"a program in the sandbox ended with {result}"


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
        # Counted per user and user namespace. Without either, all processes of the trainer's user would count.
        # Process 1 counts too, and so does the launcher if it is in the user namespace.
        processes = {"RLIMIT_NPROC": limits.processes + (1 if becomes_another else 2)} if isolated else {}
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
                "RLIMIT_CORE": 0,
                **processes,
            },
            "filter": refusing_filter().hex() if isolated else "",
        }
        feed.write(json.dumps(settings).encode())
        feed.seek(0)
        reader, writer = os.pipe()
        with open(reader, "rb", buffering=0) as report, _launch(interpreter, feed, writer) as process:
            try:
                is_ready = _is_readable(report, START_TIMEOUT_S)
                said = report.read(100) if is_ready else b""
                if not said.startswith(b"started\n"):
                    raise SandboxError(_no_start(process, isolated=isolated))
                stdout, stderr, in_time, is_cut = _read(process, limits)
                if in_time:
                    said += report.read(100)
            finally:
                report.close()  # before the end of the launcher: a program that is only now being started must fail
                _stop(process)
    words = said.split()
    status = int(words[1]) if len(words) == 2 else -signal.SIGKILL  # process 1 was killed, or the time is over
    ended = Ended.TIMEOUT if not in_time else Ended.KILLED if status < 0 else Ended.EXITED
    return Execution(ended=ended, status=status, stdout=stdout, stderr=stderr, is_cut=is_cut)


def _is_readable(file: IO[bytes], timeout_s: float) -> bool:
    poll = select.poll()  # select() refuses descriptors from 1024 on
    poll.register(file, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def _launch(interpreter: str, feed: IO[bytes], writer: int) -> subprocess.Popen[bytes]:
    """Start the launcher, in the process group of this process, which is killed with a reward worker."""
    try:
        return subprocess.Popen(
            [interpreter, "-I", "-S", str(JAIL), str(writer)],
            stdin=feed,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[writer],
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
            cwd="/",
        )
    finally:
        os.close(writer)


def _no_start(process: subprocess.Popen[bytes], *, isolated: bool) -> str:
    """Stop a launcher that did not start the program, and return a sentence with its reason."""
    _stop(process)
    assert process.stderr is not None
    lines = process.stderr.read().decode(errors="replace").strip().splitlines()
    reason = lines[-1] if lines else f"no program after {START_TIMEOUT_S:g} s"
    if not isolated:
        return f"the program could not be started: {reason}"
    return (
        f"this system did not isolate a program of the model ({reason}), so it did not run; allow user namespaces "
        "(docs/reliability.md, Model-written programs), or set reward.settings.code_tests.unsafe=true to run such "
        "programs with your rights"
    )


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the launcher and all that it started, and wait for their end. Idempotent."""
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _read(process: subprocess.Popen[bytes], limits: Limits) -> tuple[str, str, bool, bool]:
    """Return the beginnings of both outputs, and two flags: the process ended in time; the first output was cut."""
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
    is_cut = len(kept[process.stdout]) > limits.output_bytes
    stdout, stderr = (
        kept[stream][: limits.output_bytes].decode(errors="replace") for stream in (process.stdout, process.stderr)
    )
    return stdout, stderr, in_time, is_cut


def _take(stream, kept: dict, selector: selectors.BaseSelector, limits: Limits) -> None:
    try:
        chunk = os.read(stream.fileno(), 2**20)
    except BlockingIOError:
        return
    if not chunk:
        selector.unregister(stream)
    kept[stream] += chunk[: limits.output_bytes + 1 - len(kept[stream])]  # one more, to tell that it was cut
