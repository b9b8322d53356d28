"""Worker process that runs reward functions, started by `rewards/workers/pool.py`.

Requests and replies are lines of JSON on a socket that is not the standard output: what a function prints cannot be
taken for a reply. Replies hold verdicts, not the objects that a function returned; nothing is pickled.

The process group dies with the trainer, also when the trainer is killed with SIGKILL and while a function holds the
interpreter lock: the kernel sends SIGKILL to the group when the last writer of a pipe is gone.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from lockstep.rewards.batches import BatchReward
from lockstep.rewards.meter import Meter, measuring
from lockstep.rewards.outcomes import judge_batch
from lockstep.rewards.resolve import resolve
from lockstep.rewards.workers.pool import RECEIVED
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.hosts.bound_process import die_with_writers
from lockstep.rollout.saved_rollouts import from_json
from lockstep.rollout.system.background_loop import run_coroutine
from lockstep.rollout.system.deadline import Finished, is_async

ORPHAN_POLL_S = 1.0


def main() -> None:
    """Serve requests until the trainer closes the socket.

    Arguments: descriptor of the socket, descriptor of the pipe whose writer must live, memory limit [bytes].
    """
    connection_fd, life_fd, memory_bytes = map(int, sys.argv[1:])
    _die_with(life_fd)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    functions: dict[str, BatchReward] = {}
    own_pid = os.getpid()
    with socket.socket(fileno=connection_fd) as connection, connection.makefile("rb") as requests:
        for request in requests:
            connection.sendall(RECEIVED)
            command = json.loads(request)
            reply = {**_answer(command, functions), "call": command["call"]}
            if os.getpid() != own_pid:
                os._exit(0)  # a function forked, and its copy of this process returned as well
            _flush()
            connection.sendall(json.dumps(reply).encode() + b"\n")


def _answer(request: Mapping[str, Any], functions: dict[str, BatchReward]) -> dict[str, Any]:
    key = json.dumps([request["spec"], request["settings"]])
    if request["do"] == "load":
        try:
            if "pickle" in request:
                from lockstep.rewards.workers.copies import unpickle

                unpickle(request["spec"], request)
            functions[key] = resolve(request["spec"], request["settings"])
        except ConfigError as error:
            return {"error": str(error)}
        return {"scope": functions[key].scope}
    rollouts = [from_json(rollout) for rollout in request["rollouts"]]
    num_turns = [rollout.num_turns if request["by_turn"] else None for rollout in rollouts]
    with measuring(Meter(num_updates=request["num_updates"])) as meter:
        result = _run(functions[key].calling(rollouts))
    verdicts = judge_batch(result, num_turns, dict(meter.columns))
    # The traceback or the function's module may still hold what was allocated before a MemoryError.
    retire = isinstance(result.error, MemoryError) or _lacks_streams()
    measures = [dict(meter.sums), dict(meter.counts)]
    return {"verdicts": [asdict(verdict) for verdict in verdicts], "measures": measures, "retire": retire}


def _run(function: Callable[[], Any]) -> Finished:
    """Call the function on the main thread, where functions that use SIGALRM for their own timeouts work."""
    modules = dict(sys.modules)
    try:
        value = run_coroutine(function()) if is_async(function) else function()
    except BaseException as error:  # SystemExit and KeyboardInterrupt are the function's as well, and are reported
        return Finished(error=error)
    finally:
        # Not for the next function: an alarm that would end this process, and missing or replaced modules.
        for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
            signal.setitimer(timer, 0)
        sys.modules.update(modules)
    return Finished(value=value)


def _lacks_streams() -> bool:
    """True if the function closed or removed a standard stream; the next one could not print."""
    return any(getattr(stream, "closed", True) for stream in (sys.stdout, sys.stderr))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # the function closed or replaced it
            stream.flush()


def _die_with(life_fd: int) -> None:
    """Kill this process group when the last writer of the pipe, or the parent (a forked sibling may write), is gone."""
    die_with_writers(life_fd)
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(ORPHAN_POLL_S)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, name="lockstep-orphan-guard", daemon=True).start()


if __name__ == "__main__":
    main()
