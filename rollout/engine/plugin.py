"""The vLLM general plugin: what Lockstep adds to every vLLM process, and to the processes of its own engines.

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`). In all of them it only
names the gloo weight transfer. In processes that `rollout/engine/embedded.py` started, marked by `CHILD_ENV`,
it also makes the process a good child:

* it exits when its parent does, also when the parent was killed with SIGKILL (vLLM's own would live for ever);
* it leaves the terminal's process group, so that Ctrl-C reaches the trainer alone, which can then finish its update.

Not covered: the seconds between the start of a child and the loading of plugins, which are imports.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import threading

CHILD_ENV = "LOCKSTEP_ENGINE_CHILD"
"""Set while an embedded engine starts its processes."""
SCHEDULER = "rollout.engine.scheduler.once"
"""What engines and servers of the project's own get as `scheduler_cls`."""

ORPHAN_POLL_S = 1.0


def register() -> None:
    """Entry point `lockstep`; safe to call more than once."""
    _register_gloo()
    parent = multiprocessing.parent_process()
    if CHILD_ENV in os.environ and parent is not None:
        _leave_the_terminal()
        _exit_with_parent(parent.sentinel)


def _register_gloo() -> None:
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory, WeightTransferTrainerFactory

    # Registering a name twice is an error in vLLM, and it offers no public way to ask whether a name is taken.
    if "gloo" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("gloo", "rollout.weights.gloo.worker", "GlooWeightTransferEngine")
    if "gloo" not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine(
            "gloo", "rollout.weights.gloo.trainer", "GlooTrainerWeightTransferEngine"
        )


def _leave_the_terminal() -> None:
    if os.getpgrp() != os.getpid():  # a process that already leads a group may not start a session
        os.setsid()


def _exit_with_parent(parent_sentinel: int) -> None:
    """Watch the parent on a thread: its sentinel, and its pid in case a forked sibling holds the sentinel open."""
    parent_pid = os.getppid()

    def watch() -> None:
        while os.getppid() == parent_pid:
            if multiprocessing.connection.wait([parent_sentinel], timeout=ORPHAN_POLL_S):
                break
        os._exit(1)  # a clean exit would wait for threads that sit in collectives

    threading.Thread(target=watch, name="lockstep-orphan-guard", daemon=True).start()
