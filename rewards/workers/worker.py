"""The process that runs reward functions for somebody else: `rewards/workers/pool.py` starts it and talks to it.

Requests and replies are JSON behind a length, on a socket that is not its standard output: what a function prints
cannot be taken for an answer. Rollouts arrive as JSON, so a function can only change a copy. Replies are verdicts,
not the objects that a function returned; nothing is pickled in either direction.

A process group of its own dies with the trainer, also when the trainer was killed with SIGKILL and also while a
function holds the interpreter lock: the kernel sends SIGKILL to the group when the last writer of a pipe is gone.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from rewards.outcomes import Verdict, judge_batch, judge_call
from rewards.resolve import configure, resolve
from rewards.trl import BatchReward
from rewards.workers.frames import LENGTH, RECEIVED
from rollout.errors import ConfigError
from rollout.saved_rollouts import from_json
from rollout.system.deadline import Finished, is_async

ORPHAN_POLL_S = 1.0
_F_SETSIG = 10  # linux/fcntl.h; the fcntl module does not name it


def main() -> None:
    """Arguments: descriptor of the socket, descriptor of the pipe whose writer must live, memory limit [bytes]."""
    connection_fd, life_fd, memory_bytes = map(int, sys.argv[1:])
    _die_with(life_fd)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    functions: dict[str, Callable[..., Any] | BatchReward] = {}
    own_pid = os.getpid()
    with socket.socket(fileno=connection_fd) as connection:
        while (request := _receive(connection)) is not None:
            connection.sendall(RECEIVED)
            reply = _answer(request, functions)
            if os.getpid() != own_pid:
                os._exit(0)  # a function forked, and its copy of this process came back, too
            _flush()
            payload = json.dumps(reply).encode()
            connection.sendall(LENGTH.pack(len(payload)) + payload)


def _answer(request: Mapping[str, Any], functions: dict[str, Callable[..., Any] | BatchReward]) -> dict[str, Any]:
    key = json.dumps([request["spec"], request["settings"]])
    if request["do"] == "load":
        try:
            name, function = resolve(request["spec"])
            functions[key] = configure(name, function, request["settings"])
        except ConfigError as error:
            return {"error": str(error)}
        return {"is_batch": isinstance(functions[key], BatchReward)}
    function = functions[key]
    rollouts = [from_json(rollout) for rollout in request["rollouts"]]
    if isinstance(function, BatchReward):
        finished = _run(function.function, **function.arguments(rollouts))
        verdicts = judge_batch(finished, len(rollouts))
    else:
        finished = _run(function, *rollouts)
        verdicts = [judge_call(finished)]
    # What was allocated before a MemoryError may still be held by the traceback or by the function's module.
    return {"verdicts": [_to_json(verdict) for verdict in verdicts], "retire": isinstance(finished.error, MemoryError)}


def _run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Finished:
    """On the main thread, where functions that use SIGALRM for their own timeouts work."""
    try:
        value = asyncio.run(function(*args, **kwargs)) if is_async(function) else function(*args, **kwargs)
    except BaseException as error:  # whatever it is, it is the function's, and the trainer wants to know
        return Finished(error=error)
    return Finished(value=value)


def _to_json(verdict: Verdict) -> dict[str, Any]:
    return {"outcome": verdict.outcome, "value": verdict.value, "detail": verdict.detail}


def _receive(connection: socket.socket) -> Any:
    """The next request; None when the trainer has closed the socket."""
    header = _read(connection, LENGTH.size)
    return None if header is None else json.loads(_read(connection, *LENGTH.unpack(header)) or b"null")


def _read(connection: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        chunk = connection.recv(min(count - len(data), 2**20))
        if not chunk:
            return None
        data += chunk
    return bytes(data)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # a function closed or replaced it: its output is its own affair
            continue


def _die_with(life_fd: int) -> None:
    """Kill this process group when the last writer of the pipe is gone; watch the parent's pid as well, in case a
    forked sibling keeps the pipe open."""
    fcntl.fcntl(life_fd, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(life_fd, _F_SETSIG, int(signal.SIGKILL))
    fcntl.fcntl(life_fd, fcntl.F_SETFL, fcntl.fcntl(life_fd, fcntl.F_GETFL) | os.O_ASYNC)
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(ORPHAN_POLL_S)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, name="lockstep-orphan-guard", daemon=True).start()


if __name__ == "__main__":
    main()
