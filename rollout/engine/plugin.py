"""Lockstep's vLLM plugin: its weight transfers, and the lifetime of engine processes.

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`). A process started by
`rollout/engine/embedded.py`, marked by `CHILD_ENV`, then exits with its parent, also after SIGKILL (vLLM's own would
run forever), and leaves the terminal's process group, so Ctrl-C reaches only the trainer, which finishes its update.

Not covered: the seconds before plugins are loaded, in which a child imports vLLM.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import threading

CHILD_ENV = "LOCKSTEP_ENGINE_CHILD"
"""Environment variable set while an embedded engine starts its processes."""
SCHEDULER = "rollout.engine.scheduler.buffered_scheduler"
"""`scheduler_cls` of Lockstep's engines and servers."""

TRANSPORTS = (
    ("gloo", "rollout.weights.gloo.worker", "rollout.weights.gloo.trainer", "Gloo"),
    ("cuda_ipc", "rollout.weights.cuda_ipc", "rollout.weights.cuda_ipc", "CudaIpc"),
)
"""Weight transfers: name, modules of the engine's and the trainer's side, and the beginning of their class names."""

ORPHAN_POLL_S = 1.0


def register() -> None:
    """Entry point `lockstep`; may be called repeatedly."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory, WeightTransferTrainerFactory

    # Registering a name twice is an error in vLLM, which has no public way to look a name up.
    for name, receiver, sender, prefix in TRANSPORTS:
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, receiver, f"{prefix}WeightTransferEngine")
        if name not in WeightTransferTrainerFactory._registry:
            WeightTransferTrainerFactory.register_engine(name, sender, f"{prefix}TrainerWeightTransferEngine")
    parent = multiprocessing.parent_process()
    if CHILD_ENV in os.environ and parent is not None:
        if os.getpgrp() != os.getpid():  # a process that already leads a group may not start a session
            os.setsid()
        _exit_with_parent(parent.sentinel)


def _exit_with_parent(parent_sentinel: int) -> None:
    """Watch the parent in a thread: its sentinel, and its pid in case a forked sibling holds the sentinel open."""
    parent_pid = os.getppid()

    def watch() -> None:
        while os.getppid() == parent_pid:
            if multiprocessing.connection.wait([parent_sentinel], timeout=ORPHAN_POLL_S):
                break
        os._exit(1)  # a clean exit would wait for threads blocked in collectives

    threading.Thread(target=watch, name="lockstep-orphan-guard", daemon=True).start()
