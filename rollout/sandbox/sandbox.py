"""Local sandbox for programs that a model wrote, one for each, or one for all programs of an episode.

Covered, in layers:
* always: everything is killed at the wall-clock limit, and when this process ends; an empty environment; limits on CPU
  time, memory, file size, open files and core dumps; output that is read up to a limit; no descriptor, no standard
  input and no kernel keyring of the trainer; if memory runs out, the kernel takes the program before the trainer;
* in namespaces: no network, not even loopback; no view of other processes, no signals to them, and all of its own die
  with it, also those in sessions of their own, before its result is known; of the file system only the interpreter and
  system libraries, read-only, and one writable directory, which is in memory, bounded in bytes and files, and gone with
  the sandbox, also when this process is killed; a limit on processes, not shared with other processes or sandboxes
  (Linux 5.14); no capabilities, no way to new privileges; as root: a user id of its own; no system calls that get
  around these (`system_calls.py`).

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
import fcntl
import functools
import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lockstep.rollout.errors import ConfigError, SandboxError
from lockstep.rollout.sandbox import REWARD_SETTING
from lockstep.rollout.sandbox.execution import Execution, Limits
from lockstep.rollout.sandbox.program_session import Enclosure, Session
from lockstep.rollout.sandbox.system_calls import refusing_filter

JAIL = Path(__file__).with_name("jail.py")
PROCESS_1 = Path(__file__).with_name("process_1.py")
FIRST_UID, NUM_UIDS = 0x7000_0000, 0x0FFE_0000
"""User ids for programs when this process is root, unused in systemd's table of user ids (docs/UIDS-GIDS.md)."""
PREFIX = "lockstep-sandbox-"
READ_ONLY = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache")
START_TIMEOUT_S = 20.0
"""Limit for building the sandbox, apart from the program's own."""
WORKDIR, PLACE = "/sandbox", "/call"
"""Directories of an episode's files, and of the text of its current program: one that fills the first can still be
followed by one that empties it."""
PLACE_BYTES = 4 * 2**20


def run_python(
    source: str,
    *,
    stdin: str = "",
    limits: Limits | None = None,
    unsafe: bool = False,
    setting: str | None = REWARD_SETTING,
) -> Execution:
    """Run a program in the sandbox; it can import the standard library only.

    unsafe: run it without namespaces, with the rights of this process. setting: of `local_enclosure`. Raises:
        SandboxError: the program was not started; the system may not allow namespaces.
        ConfigError: the program would run without namespaces as root.
    """
    limits = limits or Limits()
    room = 4 * (len(source) + len(stdin))  # a character has up to 4 bytes
    enclosure = local_enclosure(limits, unsafe=unsafe, setting=setting, single_program_bytes=room)
    call = {
        "files": {"program.py": source, "stdin": stdin},
        "command": [enclosure.python, "-I", "-B", "program.py"],
        "env": {"HOME": WORKDIR, "LANG": "C.UTF-8", "PATH": "/usr/bin"},
    }
    with contextlib.closing(Session(enclosure)) as session:
        return session.run(call, timeout_s=limits.timeout_s, output_bytes=limits.output_bytes)


def isolation_problem(setting: str | None = REWARD_SETTING) -> str | None:
    """Return the reason why this system cannot isolate programs, or None; tried by running one."""
    try:
        result = run_python("print(6 * 7)", limits=Limits(timeout_s=START_TIMEOUT_S), setting=setting)
    except SandboxError as error:
        return str(error)
    return None if result.stdout == "42\n" else f"a program in the sandbox ended with {result}"


def local_enclosure(
    limits: Limits, *, unsafe: bool, setting: str | None, single_program_bytes: int | None = None
) -> Enclosure:
    """Return walls of this system's namespaces, or none.

    setting: the one that turns them off, for messages; None: there is none. single_program_bytes: size of the only
    program and its input, which then lie in the working directory.
    Raises `ConfigError`: programs would run as root without isolation.
    """
    refuse_unisolated_root(unsafe)
    interpreter = os.path.realpath(sys.executable)
    stack = contextlib.ExitStack()
    if unsafe:
        top = stack.enter_context(_directory())
        workdir, place = (top, top) if single_program_bytes is not None else (top + WORKDIR, top + PLACE)
        for path in (workdir, place):
            os.makedirs(path, exist_ok=True)
        walls, processes = None, {}
    else:
        workdir, place = WORKDIR, PLACE if single_program_bytes is None else WORKDIR
        writable = {place: PLACE_BYTES, workdir: limits.disk_mib * 2**20 + (single_program_bytes or 0)}
        is_root = _is_root_of_all()
        walls = {
            "binds": [*READ_ONLY, os.path.realpath(sys.base_prefix)],
            "writable": writable,
            "uids": [FIRST_UID, NUM_UIDS] if is_root else None,
        }
        # Counted per user and user namespace. Without either, all processes of the trainer's user would count.
        # Process 1 counts too, and so does the launcher if it is in the user namespace.
        processes = {"RLIMIT_NPROC": limits.processes + (1 if is_root else 2)}
    return Enclosure(
        command=[interpreter, "-I", "-S", str(JAIL)],
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
        settings={
            "walls": walls,
            "workdir": workdir,
            "place": place,
            "limits": {**common_limits(limits), **processes},
            "filter": "" if unsafe else refusing_filter().hex(),
        },
        limits=limits,
        start_timeout_s=START_TIMEOUT_S,
        refused=_unsafe_refusal if unsafe else functools.partial(_refusal, setting),
        python=interpreter,
        path=f"{os.path.dirname(interpreter)}:/usr/bin:/bin",
        release=stack.close,
    )


def common_limits(limits: Limits) -> dict[str, int]:
    """Return the limits of each process by name of the rlimit, which hold with any walls."""
    return {
        "RLIMIT_CPU": limits.cpu_s,
        "RLIMIT_AS": limits.memory_mib * 2**20,
        "RLIMIT_FSIZE": limits.file_mib * 2**20,
        "RLIMIT_NOFILE": limits.open_files,
        "RLIMIT_CORE": 0,
    }


def refuse_unisolated_root(unsafe: bool) -> None:
    if unsafe and os.geteuid() == 0:
        raise ConfigError(
            "code of a model is not run as root without isolation, found unsafe=true; leave it out, or start the run "
            "as another user"
        )


def _refusal(setting: str | None, reason: str) -> str:
    without = "" if setting is None else f", or set {setting}=true to run such programs with your rights"
    return (
        f"this system did not isolate a program of the model ({reason}), so it did not run; allow user namespaces "
        f"(docs/reliability.md, Model-written programs){without}"
    )


def _unsafe_refusal(reason: str) -> str:
    return f"the program could not be started: {reason}"


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
