"""Two nodes of a launch file as two processes on this machine: they train together, stop together and continue."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.trainer.checkpoint import stored
from tests.fixtures.processes import descendants
from tests.integration.test_launch_files import free_port
from tests.integration.test_run import ROOT, demo, metrics  # noqa: F401  # `demo` is a fixture
from tests.unit.project.test_launching import on_kubernetes

pytestmark = [pytest.mark.engine, pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(900)]

SMALL = ("rollout.prompts_per_step=4", "rollout.samples_per_prompt=4", "logger.print_rollouts=0")


def start(settings: tuple[str, ...], directory: Path) -> list[subprocess.Popen[bytes]]:
    """Start both pods of configs/kubernetes/colocated.yaml with other settings, on loopback."""
    port, pods = free_port(), []
    for rank in range(2):
        line, variables = on_kubernetes("colocated", rank)
        line = [*line[: line.index("run") + 1], *settings]
        own = {"NODES": "127.0.0.1 127.0.0.1", "GPUS": "1", "PORT": str(port), "VENV": sys.prefix}
        own |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HOME": os.environ.get("HF_HOME", "")}
        with (directory / f"node-{rank}.log").open("ab") as log:
            environment = {name: value for name, value in {**os.environ, **variables, **own}.items() if value}
            pods.append(subprocess.Popen(line, cwd=ROOT, env=environment, stdout=log, stderr=log))
    return pods


def wait_for(condition: Callable[[], bool], pods: list[subprocess.Popen[bytes]], limit_s: float = 400) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert all(pod.poll() is None for pod in pods)
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_a_preempted_node_stops_both_and_both_continue(demo: tuple[str, ...], tmp_path: Path) -> None:  # noqa: F811
    run = tmp_path / "launched"
    settings = (
        *demo, *SMALL, "rollout=embedded", f"run_root={tmp_path}", "run_name=launched", "resume=auto", "eval.every=0",
    )  # fmt: skip
    pods = start((*settings, "updates=500"), tmp_path)
    try:
        wait_for(lambda: (run / "metrics.jsonl").exists() and len(metrics(run)) >= 2, pods)
        pods[1].send_signal(signal.SIGTERM)
        statuses = [pod.wait(timeout=200) for pod in pods]
        assert 0 not in statuses, "a status of 0 would end a node's part for good"
        last = int(metrics(run)[-1]["step"])
        found, skipped = stored.complete(run / "checkpoints")
        assert (found[-1].name, skipped) == (f"step-{last}", [])

        pods = start((*settings, f"updates={last + 1}"), tmp_path)
        assert [pod.wait(timeout=400) for pod in pods] == [0, 0]
        assert [line["step"] for line in metrics(run)] == list(range(1, last + 2))
    finally:
        print(*((tmp_path / f"node-{rank}.log").read_text()[-4000:] for rank in range(2)), sep="\n")
        for pod in pods:
            for pid in {pod.pid, *descendants(pod.pid)} if pod.poll() is None else ():
                os.kill(pid, signal.SIGKILL)
