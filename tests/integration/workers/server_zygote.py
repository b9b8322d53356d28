"""Starts many vLLM servers quickly: vLLM is imported once, and every server is a fork of this process.

Run by `tests/fixtures/zygote.py`; a server that is started as users start it spends 20 seconds in imports. Reads lines
of JSON, and answers each with the pid of the fork:

    {"server": [arguments], "log": file}    a server
    {"sender": url, "log": file}            a trainer that is killed while its weights are on the way to this server

Ends its forks when its input ends.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch

torch.set_num_threads(1)  # a fork after threads have computed hangs

from vllm.entrypoints.launchers.api_server import entry  # noqa: E402
from vllm.v1.engine import async_llm, core, utils  # noqa: E402, F401

from rollout.plugin import register  # noqa: E402
from tests.integration.workers import killed_sender  # noqa: E402


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks that end leave nothing behind
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    register()
    print("ready", file=answers, flush=True)
    pids = []
    for line in sys.stdin:
        request = json.loads(line)
        if "server" in request:
            become = partial(serve, request["server"])
        else:
            become = partial(killed_sender.main, request["sender"])
        pids.append(fork(become, request["log"]))
        print(pids[-1], file=answers, flush=True)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def fork(become: Callable[[], None], log_path: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        become()
    finally:
        os._exit(1)  # never back into the loop of the parent


def serve(arguments: list[str]) -> None:
    # The CPU platform asks for spawn, which would import everything again for the engine.
    utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    sys.argv = ["server", *arguments]
    entry.main()


if __name__ == "__main__":
    main()
