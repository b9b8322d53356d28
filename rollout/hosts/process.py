"""Host: a process with an interpreter of its own that plays the environments of one package.

Covered: every request has a deadline; a host that hangs is killed, with all episodes that it plays, and the next
episode starts another; it ends when this process ends, however it ends, because its input does.

Not covered: isolation. A host has the rights of this process; packages of environments are trusted.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import itertools
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from lockstep.rollout.errors import ConfigError, EnvironmentFault
from lockstep.rollout.replies import read_json
from lockstep.rollout.system.captured_output import OutputTail

CHILD = Path(__file__).with_name("child.py")
MAX_ANSWER_BYTES = 4 * 2**20
END_S = 0.2
"""Time to read what a process wrote before its end [s]."""
_hosts: dict[tuple[str, Path], Host] = {}
_lock = threading.Lock()


class Host:
    """A running host; usable from any thread and loop."""

    def __init__(self, python: str, program: Path) -> None:
        """python: path of the interpreter. program: a module, see `child.py`. Raises `EnvironmentFault`."""
        self.name = program.stem
        self._waiting: dict[int, concurrent.futures.Future[Any]] = {}
        self._numbers = itertools.count()
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._output = OutputTail()
        self._guard = threading.Lock()
        self.is_alive = True
        self._fault = ""
        # Programs that were installed beside the interpreter, such as uv, are found where the PATH has none.
        path = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(python).parent)])
        try:
            self._process = subprocess.Popen(
                [python, str(CHILD), str(program)],
                env={**os.environ, "PATH": path},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except OSError as error:
            raise EnvironmentFault(f"{self.name}: {python} could not be started: {error}") from error
        self._output.follow(self._process.stderr)
        for work in (self._write, self._read):
            threading.Thread(target=work, name=f"host:{self.name}", daemon=True).start()

    async def ask(self, do: str, *, timeout_s: float, **arguments: Any) -> Any:
        """Return the answer to a request.

        Raises `EnvironmentFault` if the environment raised, or if the host died or did not answer in time, which ends
        it; `ConfigError` for a setting that no episode can be played with.
        """
        answer: concurrent.futures.Future[Any] = concurrent.futures.Future()
        number = next(self._numbers)
        with self._guard:
            if not self.is_alive:
                raise EnvironmentFault(self._death())
            self._waiting[number] = answer
        self._requests.put(json.dumps({"id": number, "do": do, "arguments": arguments}).encode() + b"\n")
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.wrap_future(answer)
        except TimeoutError:
            self.end()
            raise EnvironmentFault(
                f"{self.name}: no answer to {do!r} in {timeout_s:g} s, so its process was ended; raise "
                "environment.settings.timeout_s"
            ) from None
        finally:
            self._waiting.pop(number, None)

    def end(self) -> None:
        """Kill the process and the programs that it started. Requests that wait for an answer fail."""
        self._kill()
        self._requests.put(None)
        self._fail()

    def _kill(self) -> None:
        with suppress(psutil.NoSuchProcess):
            family = psutil.Process(self._process.pid).children(recursive=True)  # known only while it lives
            self._process.kill()
            for one in family:
                with suppress(psutil.NoSuchProcess):
                    one.kill()

    def _write(self) -> None:
        """Send requests from a thread: a child that hangs reads nothing, and a full pipe would block the event loop."""
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):
            while (line := self._requests.get()) is not None:
                self._process.stdin.write(line)
                self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline(MAX_ANSWER_BYTES):
            try:
                answer = read_json(line, is_finite=False)
                waiting = self._waiting.get(answer["id"])
                if waiting is None or waiting.done():
                    continue
                if "error" in answer:
                    kind = ConfigError if answer["is_setting"] is True else EnvironmentFault
                    waiting.set_exception(kind(f"{self.name}: {answer['error']}"))
                else:
                    waiting.set_result(answer["value"])
            except (ValueError, KeyError, TypeError) as error:
                self._fault = f": an answer that is not of the protocol ({error}): {line[:200]!r}"
                break
        self._kill()
        self._process.wait()
        self._fail(wait_s=END_S)

    def _fail(self, *, wait_s: float = 0.0) -> None:
        with self._guard:
            self.is_alive = False
            waiting = list(self._waiting.values())
        for answer in waiting:
            with suppress(concurrent.futures.InvalidStateError):
                answer.set_exception(EnvironmentFault(self._death(wait_s)))

    def _death(self, wait_s: float = 0.0) -> str:
        lines = self._output.text(wait_s=wait_s).splitlines()
        detail = self._fault or (f": {lines[-1]:.500}" if lines else "")
        return f"{self.name}: its process ended with status {self._process.poll()}{detail}"


def host(python: str, program: Path) -> Host:
    """Return the host of an interpreter and a program in this process; start one if none is alive."""
    with _lock:
        program_host = _hosts.get((python, program))
        if program_host is None or not program_host.is_alive:
            program_host = _hosts[python, program] = Host(python, program)
        return program_host


def interpreter(python: str | None) -> str:
    """Return the path of the interpreter that a setting names; null: this one. Raises `ConfigError`."""
    if python is None:
        return sys.executable
    path = shutil.which(str(Path(os.path.expanduser(python))))
    if path is None:
        raise ConfigError(
            f"environment.settings.python={python} is not a program; set it to the Python in whose environment the "
            "package is installed, for example ~/envs/games/bin/python, or to null for this one"
        )
    return path


@atexit.register
def _end_all() -> None:
    for one in _hosts.values():
        one.end()
