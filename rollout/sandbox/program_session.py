"""Session of a sandbox: starts its process 1 behind walls of some kind, and exchanges calls and results with it.

Covered: each exchange has a deadline; what a compromised sandbox may answer is checked and bounded; `close` ends
everything from any thread, also during a call; the sandbox ends when this process ends, however it ends, because the
kernel kills the launcher with the thread that started it, and process 1 ends with its input.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import select
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any, TypeVar

from lockstep.rollout.errors import SandboxError
from lockstep.rollout.sandbox.execution import Ended, Execution, Language, Limits, read_execution, read_object
from lockstep.rollout.system.captured_output import OutputTail

STOP_TIMEOUT_S = 5.0
"""Time for process 1 to end a program beyond its limit, and for the launcher to end all processes."""
CHUNK_BYTES = 2**20
MAX_EVENT_BYTES = 2**12
"""Longest answer that holds no output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Enclosure:
    """Walls of one kind, and names of what is behind them."""

    command: Sequence[str]
    """Program that speaks the protocol of `process_1.py` on its standard input and output."""
    env: Mapping[str, str]
    """Environment of this program, not of those behind the walls."""
    settings: Mapping[str, Any]
    """First line of its input."""
    limits: Limits
    start_timeout_s: float
    """Limit for building the walls and for starting a program, apart from the program's own."""
    refused: Callable[[str], str]
    """Makes the sentence of the error that a program was not started, from the reason."""
    python: str
    """Interpreter behind the walls."""
    path: str
    """Variable PATH of the programs."""
    stop: Callable[[subprocess.Popen[bytes]], None] = subprocess.Popen.terminate
    """Makes the processes end; called without a lock, also for one that has ended."""
    release: Callable[[], None] = lambda: None
    """Frees what is left when they have ended."""
    has_own_group: bool = False
    """True for a program that signals of a terminal, as Ctrl-C, must not reach."""


def tool_call(enclosure: Enclosure, language: Language, text: str) -> dict[str, Any]:
    """Return the call of a program that keeps its files in the working directory, and may import modules from it."""
    workdir, place = enclosure.settings["workdir"], enclosure.settings["place"]
    name = "program.py" if language is Language.PYTHON else "program.sh"
    interpreter = enclosure.python if language is Language.PYTHON else "/bin/sh"
    return {
        "files": {name: text, "stdin": ""},
        "command": [interpreter, f"{place}/{name}"],
        "env": {
            "HOME": workdir,
            "LANG": "C.UTF-8",
            "PATH": enclosure.path,
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": workdir,
            "TMPDIR": workdir,
        },
    }


T = TypeVar("T")
_open: weakref.WeakSet[Session] = weakref.WeakSet()
os.register_at_fork(after_in_child=_open.clear)  # they are the parent's


class _Unusable(Exception):
    """Process 1 has ended, or its answer is not of the protocol."""


class Session:
    """A sandbox from its start to `close`; it runs one program at a time. Usable from any thread."""

    def __init__(self, enclosure: Enclosure) -> None:
        """Raises `SandboxError`: the walls could not be built."""
        self.enclosure = enclosure
        self._lock = threading.Lock()
        self._answers = bytearray()
        self.is_closed = False
        """True after `close`, and after the loss of the sandbox during a call."""
        self._is_stopped = False
        try:
            self._process = _started(enclosure)
        except OSError as error:
            enclosure.release()
            raise SandboxError(enclosure.refused(f"{enclosure.command[0]}: {error.strerror}")) from error
        _open.add(self)
        self._output = OutputTail().follow(self._process.stderr)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests: IO[bytes] = self._process.stdin
        self._stream: IO[bytes] = self._process.stdout
        with self._lock:
            self._begin(enclosure.settings, "ready")

    def run(self, call: Mapping[str, Any], *, timeout_s: float, output_bytes: int) -> Execution:
        """Run a program; no process of it is left. A sandbox that is lost on the way counts as killed or timed out, and
        is then closed. call: files, command and env of a call of `process_1.py`.

        Raises `SandboxError`: the program was not started, or the sandbox is closed.
        """
        with self._lock:
            if self.is_closed:
                raise SandboxError("the sandbox is closed, so the program did not run")
            self._begin({**call, "timeout_s": timeout_s, "output_bytes": output_bytes}, "started")
            try:
                most = MAX_EVENT_BYTES + 2 * 6 * output_bytes  # a byte of either output takes up to six in JSON
                return read_execution(self._receive(time.monotonic() + timeout_s + STOP_TIMEOUT_S, most))
            except (_Unusable, ValueError, TimeoutError) as error:
                self._end()
                ending = Ended.TIMEOUT if isinstance(error, TimeoutError) else Ended.KILLED
                return Execution(ended=ending, status=-signal.SIGKILL, stdout="", stderr="")

    def close(self) -> None:
        """End everything, and wait for the end; a call in progress ends as killed. Idempotent."""
        self._stop()
        with self._lock:  # of a call that now ends
            self._end()

    def _begin(self, request: Mapping[str, Any], event: str) -> None:
        """Send a request and wait for the answer that it was understood. Raises `SandboxError`, and is then closed."""
        enclosure = self.enclosure
        deadline = time.monotonic() + enclosure.start_timeout_s
        try:
            self._send(request, deadline)
            answer = self._receive(deadline, MAX_EVENT_BYTES)
            if answer.get(event) is True:
                return
            reason = str(answer.get("failed", f"an answer without {event}: {answer}"))
        except TimeoutError:
            reason = f"no program after {enclosure.start_timeout_s:g} s"
        except _Unusable as error:
            self._stop()
            lines = self._output.text(wait_s=STOP_TIMEOUT_S).splitlines()
            reason = lines[-1] if lines else str(error)
        self._end()
        raise SandboxError(enclosure.refused(reason))

    def _send(self, request: Mapping[str, Any], deadline: float) -> None:
        text = memoryview(json.dumps(request).encode() + b"\n")
        try:
            while text:
                _wait(self._requests, select.POLLOUT, deadline)
                text = text[self._requests.write(text[:CHUNK_BYTES]) or 0 :]
        except OSError as error:
            raise _Unusable(f"it has ended ({error.strerror})") from error

    def _receive(self, deadline: float, max_bytes: int) -> dict[str, Any]:
        """Return the next answer. Raises `_Unusable`, or `TimeoutError` at the deadline."""
        start = 0
        while (end := self._answers.find(b"\n", start)) < 0:
            start = len(self._answers)
            if start > max_bytes:
                break
            _wait(self._stream, select.POLLIN, deadline)
            chunk = self._stream.read(CHUNK_BYTES)
            if not chunk:
                raise _Unusable("it has ended")
            self._answers += chunk
        if not 0 <= end <= max_bytes:
            raise _Unusable(f"an answer of more than {max_bytes} bytes")
        line = bytes(self._answers[:end])
        del self._answers[: end + 1]
        try:
            return read_object(line)
        except ValueError as error:
            raise _Unusable(f"an answer that is {error}") from error

    def _stop(self) -> None:
        """End the launcher and all that it started, and wait for their end."""
        if not self._is_stopped:
            self._is_stopped = True
            self.enclosure.stop(self._process)
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _end(self) -> None:
        """Stop and let go of everything. Only with the lock, because another thread could wait for the pipes."""
        if self.is_closed:
            return
        self.is_closed = True
        self._stop()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):
                pipe.close()
        self.enclosure.release()


class SessionSandbox:
    """`Sandbox` whose calls run in threads, so that other episodes continue."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @classmethod
    async def open(cls, make: Callable[[], Enclosure]) -> SessionSandbox:
        """Open a session. Raises `SandboxError`. If the caller is canceled, the new session is closed."""
        opening = _in_thread(lambda: Session(make()))
        try:
            return cls(await _result(opening))
        except asyncio.CancelledError:
            opening.add_done_callback(lambda opened: opened.exception() or opened.result().close())
            raise

    async def run(self, language: Language, text: str, *, timeout_s: float) -> Execution:
        session = self._session
        call = tool_call(session.enclosure, language, text)
        most = session.enclosure.limits.output_bytes
        result = await _result(_in_thread(lambda: session.run(call, timeout_s=timeout_s, output_bytes=most)))
        if session.is_closed:
            raise SandboxError(f"the sandbox ended during a call ({result.ended})")
        return result

    async def close(self) -> None:
        await _result(_in_thread(self._session.close))


def _in_thread(work: Callable[[], T]) -> Future[T]:
    """Run a function in a thread of its own: those of a pool would wait for each other's programs."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="sandbox-call", daemon=True).start()
    return future


async def _result(future: Future[T]) -> T:
    """Wait for a future, which goes on if the caller is canceled."""
    return await asyncio.shield(asyncio.wrap_future(future))


def _started(enclosure: Enclosure) -> subprocess.Popen[bytes]:
    """Start the launcher in a thread that lives as long as it: the kernel kills it with this thread (PR_SET_PDEATHSIG).

    It stays in the process group of this process, which is killed with a reward worker, unless it has its own.
    """
    future: Future[subprocess.Popen[bytes]] = Future()

    def live() -> None:
        try:
            process = subprocess.Popen(
                enclosure.command,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=enclosure.env,
                cwd="/",
                start_new_session=enclosure.has_own_group,
            )
        except OSError as error:
            future.set_exception(error)
            return
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        future.set_result(process)
        process.wait()

    threading.Thread(target=live, name="sandbox", daemon=True).start()
    return future.result()


def _wait(pipe: IO[bytes], event: int, deadline: float) -> None:
    """Wait until a pipe is ready or broken. Raises `TimeoutError`."""
    poll = select.poll()  # select() refuses descriptors from 1024 on
    poll.register(pipe, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError


@atexit.register
def _close_all() -> None:
    for session in list(_open):
        session.close()
