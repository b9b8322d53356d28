"""Runs that get a signal, and runs whose logs cannot be written."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from lockstep.trainer.checkpoint import stored
from tests.fixtures.processes import descendants
from tests.integration.test_run import ROOT, command, demo, metrics, train  # noqa: F401  # `demo` is a fixture

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

SMALL = ("rollout.prompts_per_step=4", "rollout.samples_per_prompt=4", "logger.print_rollouts=0")


@pytest.mark.distributed
@pytest.mark.parametrize("tells", ["launcher", "everybody", "rank"])
def test_sigterm_to_two_ranks_finishes_the_update_and_saves(demo: tuple[str, ...], tmp_path: Path, tells: str) -> None:  # noqa: F811
    """A launcher passes the signal on to its ranks; a scheduler signals all, so the ranks get it twice.

    With several machines, the ranks of one get it and those of the others do not. A scheduler starts a run again unless
    its status is 0.
    """
    run, log = tmp_path / "stopped", tmp_path / "output"
    with log.open("w") as output:
        process = subprocess.Popen(
            command(*demo, *SMALL, "updates=500", f"run_root={tmp_path}", "run_name=stopped", ranks=2),
            cwd=ROOT, stdout=output, stderr=output, start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    family: set[int] = set()
    try:
        deadline = time.monotonic() + 400
        while not (run / "metrics.jsonl").exists() or len(metrics(run)) < 2:
            assert process.poll() is None, log.read_text()[-6000:]
            assert time.monotonic() < deadline
            time.sleep(0.2)
        family = descendants(process.pid)
        ranks = sorted(_children(process.pid))
        told = {"launcher": [process.pid], "everybody": [*ranks, process.pid], "rank": ranks[-1:]}[tells]
        for pid in told:
            os.kill(pid, signal.SIGTERM)
        process.wait(timeout=120)
    finally:
        for pid in family if process.poll() is None else ():
            os.kill(pid, signal.SIGKILL)
    assert process.returncode != 0
    said = log.read_text()
    assert "exited at once" not in said
    assert "everything is saved" in said, said[-6000:]
    assert "--num_processes 2 -m lockstep train" in " ".join(said.split())
    last = metrics(run)[-1]["step"]
    assert last < 500
    found, skipped = stored.complete(run / "checkpoints")
    assert found[-1].name == f"step-{last}"
    assert skipped == []
    assert (run / "model" / "model.safetensors").is_file()
    deadline = time.monotonic() + 20
    while left := [pid for pid in family if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def _children(pid: int) -> set[int]:
    return {int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()}


def test_logs_that_cannot_be_written_do_not_end_the_run(demo: tuple[str, ...], tmp_path: Path) -> None:  # noqa: F811
    run = tmp_path / "logless"
    (run / "rollouts" / "step-000001.jsonl").mkdir(parents=True)
    (run / "evaluations").write_text("no directory")
    train(
        *demo, *SMALL, "updates=2", f"run_root={tmp_path}", "run_name=logless", "resume=auto", "eval.every=1",
        "eval.prompts=2",
    )  # fmt: skip
    lines = metrics(run)
    assert [line["step"] for line in lines] == [1, 2]
    assert "eval/reward_mean" in lines[1]
    assert lines[0]["health/logger_errors"] == 1  # its evaluation
    assert lines[1]["health/logger_errors"] == 3  # the rollouts of the first, and the evaluation of this one
    assert (run / "model" / "model.safetensors").is_file()
