"""Runs hostile programs in the sandbox as the user of this process, and prints the results as JSON.

    python -m tests.hostile.run_programs [--unsafe] [--session] NAME...

--session: all programs in one sandbox, with a well-behaved one after each.

After each program it looks for survivors: this process is the new parent of every process that loses its own
(`PR_SET_CHILD_SUBREAPER`), so that none of them can leave its family.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from lockstep.rollout.sandbox.execution import Execution, Language, Limits
from lockstep.rollout.sandbox.program_session import Session, tool_call
from lockstep.rollout.sandbox.sandbox import local_enclosure, run_python
from tests.hostile.cases import Case, cases

PR_SET_CHILD_SUBREAPER = 36
SESSION_KEYRING = -3
LISTENER = "\0lockstep-hostile-listener"
WELL_BEHAVED = """
import os, subprocess, threading
subprocess.run(["rm", "-rf", "--", *os.listdir()])
open("file", "w").write("x" * 1000)
threads = [threading.Thread(target=print, args=(end,)) for end in "abc"]
for thread in threads:
    thread.start()
    thread.join()
os.remove("file")
try:
    os.kill(-1, 0)
    print("not alone")
except ProcessLookupError:
    print("alone")
"""
SURVIVAL_S = 0.5
"""Time in which a process that was killed may end."""

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    unsafe, names = "--unsafe" in sys.argv, [name for name in sys.argv[1:] if not name.startswith("--")]
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    leave_secrets()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(LISTENER)
        listener.listen()
        if "--session" in sys.argv:
            found = results_of_a_session(names)
        else:
            found = {name: result(cases("programs")[name], unsafe=unsafe) for name in names}
    print(json.dumps(found))


def leave_secrets() -> None:
    """Put secrets where a program may look for them: the environment, and the keys of the session."""
    os.environ["SECRET_TOKEN"] = "hunter2"
    add_key = 248 if platform.machine() == "x86_64" else 217
    libc.syscall(add_key, b"user", b"trainer-secret", b"hunter2", 7, SESSION_KEYRING)


def result(case: Case, *, unsafe: bool) -> dict[str, object]:
    """Run a case, and return the last execution with the processes that it left."""
    for _ in range(int(case.expected.get("runs", "1"))):
        started = time.monotonic()
        execution = run_python(case.source, limits=Limits(timeout_s=2.0), unsafe=unsafe)
        took_s = time.monotonic() - started
    return {**asdict(execution), "took_s": took_s, "survivors": survivors()}


def results_of_a_session(names: Sequence[str]) -> dict[str, object]:
    """Run cases in one sandbox; `after` is the output of a well-behaved program after each."""
    limits, found = Limits(timeout_s=2.0), {}
    enclosure = local_enclosure(limits, unsafe=False, setting="environment.settings.unsafe")
    session = Session(enclosure)

    def run(source: str) -> Execution:
        call = tool_call(enclosure, Language.PYTHON, source)
        return session.run(call, timeout_s=limits.timeout_s, output_bytes=limits.output_bytes)

    for name in names:
        case = cases("programs")[name]
        for _ in range(int(case.expected.get("runs", "1"))):
            started = time.monotonic()
            execution = run(case.source)
            took_s = time.monotonic() - started
        after = run(WELL_BEHAVED)
        found[name] = {**asdict(execution), "took_s": took_s, "survivors": [], "after": after.stdout + after.stderr}
    session.close()
    return {**found, "survivors": survivors()}


def survivors() -> list[str]:
    """Return the commands of all descendants of this process that do not end by themselves, and kill them."""
    deadline = time.monotonic() + SURVIVAL_S
    while (found := descendants()) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    return list(found.values())


def descendants() -> dict[int, str]:
    """Return the commands of the living descendants of this process by pid."""
    reap()
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it has ended meanwhile
            continue
        if state != "Z":
            parents[int(path.parent.name)] = int(parent)
    family = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return {pid: command(pid) for pid in family - {os.getpid()}}


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "?"


def reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


if __name__ == "__main__":
    main()
