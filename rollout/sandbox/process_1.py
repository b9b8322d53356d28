"""Process 1 of a sandbox: runs the programs of its calls, one after another, and ends with its standard input.

`jail.py` imports it inside of its walls; a container gets its text as `python3 -c`. So it imports the standard library
only. After each call every other process of the namespace has been killed and reaped. It trusts nothing that a program
can write: it opens no path that one may have placed, except as a new file, and reads only the beginnings of outputs.
Where it is not process 1 of a namespace, it kills the process group of each program and no more.

Standard input: a line of JSON with the settings, then one per call; standard output: one that says that the first was
understood, and two per call, at the program's start and at its end.

    settings    workdir, place (directory of the programs' texts), limits by name of the rlimit, filter (of seccomp, in
                hexadecimal)
    call        files by name (their texts; `stdin` is among them), command, env, timeout_s, output_bytes
    answers     {"ready": true}; {"started": true} or {"failed": reason};
                {"ended", "status", "stdout", "stderr", "is_cut", "is_stderr_cut"}, as in `Execution`
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import stat
import sys
import time

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
SECCOMP_MODE_FILTER = 2
KEYCTL, KEYCTL_JOIN_SESSION_KEYRING = {"x86_64": 250, "aarch64": 219}.get(os.uname().machine), 1
TICK_MS = 50
"""Longest pause between two looks for ended processes that lost their parent: they count toward a limit."""
CHUNK_BYTES = 2**20
"""Largest size of a pipe without privileges, so one read empties it."""
CANNOT_EXECUTE = 126
"""Exit status of shells for a command that cannot be executed."""

libc = ctypes.CDLL(None, use_errno=True)


class FilterProgram(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


class Lines:
    """Reader of lines from a descriptor."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._read = bytearray()

    def next(self) -> bytes | None:
        """Return the next line; None at the end of the input."""
        start = 0
        while (end := self._read.find(b"\n", start)) < 0:
            start = len(self._read)
            chunk = os.read(self.descriptor, CHUNK_BYTES)
            if not chunk:
                return None
            self._read += chunk
        line = bytes(self._read[:end])
        del self._read[: end + 1]
        return line


def check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def die_with_parent() -> None:
    check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "pdeathsig")


def say(**answer: object) -> None:
    """Write an answer. Raises if its reader is gone."""
    text = memoryview(json.dumps(answer).encode() + b"\n")
    while text:
        text = text[os.write(1, text) :]


def serve(requests: Lines, settings: dict) -> None:
    """Answer calls until the input ends."""
    check(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "dumpable")  # closes memory and descriptors to other processes
    os.chdir(settings["workdir"])
    place = os.open(settings["place"], os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    say(ready=True)
    while (line := requests.next()) is not None:
        call = json.loads(line)
        try:
            try:
                stdin = put_all(call["files"], place)
            except OSError:  # a program filled or closed the place, or put a directory there
                empty(place)
                stdin = put_all(call["files"], place)
        except OSError as error:  # the text is larger than the place
            say(started=True)
            say(
                ended="exited", status=CANNOT_EXECUTE, stdout="", stderr=f"the program cannot be written: {error}\n",
                is_cut=False, is_stderr_cut=False,
            )  # fmt: skip
            continue
        run(call, settings, stdin, requests)
        os.close(stdin)


def put_all(files: dict, place: int) -> int:
    """Write the files of a call; return the descriptor of its standard input."""
    for name, text in files.items():
        put(name, text, place)
    return os.open("stdin", os.O_RDONLY | os.O_NOFOLLOW, dir_fd=place)


def empty(place: int) -> None:
    """Remove everything from a directory, whatever programs made there. None runs meanwhile."""
    os.fchmod(place, 0o700)
    while names := os.listdir(place):
        for name in names:
            if not stat.S_ISDIR(os.stat(name, dir_fd=place, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=place)
                continue
            os.chmod(name, 0o700, dir_fd=place)
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=place)
            for child in os.listdir(inner):  # one level up, since the depth is that of the programs
                if stat.S_ISDIR(os.stat(child, dir_fd=inner, follow_symlinks=False).st_mode):
                    os.chmod(child, 0o700, dir_fd=inner)  # one that is closed cannot be moved
                os.rename(child, os.urandom(16).hex(), src_dir_fd=inner, dst_dir_fd=place)
            os.close(inner)
            os.rmdir(name, dir_fd=place)


def put(name: str, text: str, place: int) -> None:
    """Write a new file. No program runs meanwhile; what an earlier one left under this name is never opened."""
    with contextlib.suppress(OSError):  # there is none; or it is a directory, and then the program is not written
        os.unlink(name, dir_fd=place)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with os.fdopen(os.open(name, flags, 0o600, dir_fd=place), "wb") as file:
        file.write(text.encode("utf-8", "replace"))


def run(call: dict, settings: dict, stdin: int, requests: Lines) -> None:
    """Run a program and say how it ended."""
    (out, out_end), (err, err_end), (failure, failure_end) = (os.pipe() for _ in range(3))
    child = os.fork()
    if child == 0:
        become(call, settings, [stdin, out_end, err_end], failure_end)
    most = call["output_bytes"]
    try:
        for writer in (out_end, err_end, failure_end):
            os.close(writer)
        if problem := os.read(failure, 1000):  # its end is closed by the start of the program
            say(failed=problem.decode(errors="replace"))
            return
        say(started=True)
        outputs, in_time = follow(child, (out, err), time.monotonic() + call["timeout_s"], most, requests)
    finally:
        status = end_all(child)
    for stream in (out, err):
        take(stream, outputs, most)
    for reader in (out, err, failure):
        os.close(reader)
    say(
        ended="timeout" if not in_time else "killed" if status < 0 else "exited",
        status=status,
        stdout=outputs[out][:most].decode(errors="replace"),
        stderr=outputs[err][:most].decode(errors="replace"),
        is_cut=len(outputs[out]) > most,
        is_stderr_cut=len(outputs[err]) > most,
    )


def become(call: dict, settings: dict, streams: list[int], said: int) -> None:
    """Become the program, in a session of its own. Never returns; writes to `said` if that fails."""
    try:
        os.setsid()
        die_with_parent()
        if KEYCTL:  # a new session keyring; where a container refuses the call, the program has no keys either
            libc.syscall(KEYCTL, KEYCTL_JOIN_SESSION_KEYRING, None)
        check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
        for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):  # ignored by Python or by the launcher
            signal.signal(number, signal.SIG_DFL)
        for target, stream in enumerate(streams):  # all others close by themselves (PEP 446)
            os.dup2(stream, target)
        for name, limit in settings["limits"].items():
            resource.setrlimit(getattr(resource, name), (limit, limit))
        instructions = bytes.fromhex(settings["filter"])
        if instructions:
            program = FilterProgram(len(instructions) // 8, instructions)
            check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0), "seccomp")
        os.execvpe(call["command"][0], call["command"], call["env"])
    except BaseException as error:
        os.write(said, f"{type(error).__name__}: {error}".encode()[:1000])
    finally:
        os._exit(CANNOT_EXECUTE)


def follow(
    child: int, streams: tuple[int, int], deadline: float, most: int, requests: Lines
) -> tuple[dict[int, bytearray], bool]:
    """Read outputs until the program ends or its time is over; return their beginnings, and True if it ended."""
    outputs = {stream: bytearray() for stream in streams}
    end = os.pidfd_open(child)
    try:
        poll = select.poll()
        poll.register(end, select.POLLIN)
        poll.register(requests.descriptor, 0)  # only that it was closed
        for stream in streams:
            os.set_blocking(stream, False)
            poll.register(stream, select.POLLIN)
        while not has_ended(child):
            left = deadline - time.monotonic()
            if left <= 0:
                return outputs, False
            for descriptor, _ in poll.poll(min(left * 1000, TICK_MS)):
                if descriptor == requests.descriptor:
                    sys.exit("the input was closed")
                if descriptor in outputs and not take(descriptor, outputs, most):
                    poll.unregister(descriptor)
        return outputs, True
    finally:
        os.close(end)


def take(stream: int, kept: dict[int, bytearray], most: int) -> bool:
    """Read what is there, and keep up to one byte beyond the limit, to tell that there was more. False at the end."""
    try:
        chunk = os.read(stream, CHUNK_BYTES)
    except BlockingIOError:
        return True
    kept[stream] += chunk[: most + 1 - len(kept[stream])]
    return bool(chunk)


def has_ended(child: int) -> bool:
    """Return True once the program has ended, without reaping it; reap other processes that have."""
    while (info := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
        if info.si_pid == child:
            return True
        os.waitpid(info.si_pid, 0)
    return False


def end_all(child: int) -> int:
    """Kill and reap the program and all other processes; return its exit status, or minus the number of its signal."""
    if os.getpid() != 1:
        with contextlib.suppress(ProcessLookupError):  # it has not even made its session
            os.killpg(child, signal.SIGKILL)  # before it is reaped: until then no other group can have its number
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 0
    while True:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # all but process 1, at one moment: a fork in progress fails
        try:
            pid, status = os.wait()
        except ChildProcessError:
            return code
        if pid == child:
            code = os.waitstatus_to_exitcode(status)


def main() -> None:
    requests = Lines(0)
    if (line := requests.next()) is not None:
        serve(requests, json.loads(line))


if __name__ == "__main__":
    main()
