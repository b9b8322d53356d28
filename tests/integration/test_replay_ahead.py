"""`lockstep replay --run` follows a run with rollouts made ahead, bit for bit."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from lockstep.rollout.saved_rollouts import read_rollouts
from tests.fixtures.forked_python import forked_python
from tests.integration.test_run import ROOT, demo, train  # noqa: F401  # `demo` is a fixture

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]

RECORDED = (
    *("rollout.num_threads=1", "rollout.max_staleness=2", "rollout.prompts_per_step=3", "rollout.samples_per_prompt=4"),
    *("checkpoint.every=1", "checkpoint.keep=9", "logger.print_rollouts_every=0", "data.heldout_path=null"),
)
SLOW = ("environment=slow_calculator", "environment.settings.max_delay_s=0.3")


def replay(*arguments: object) -> tuple[int, str]:
    done = subprocess.run(
        [forked_python(), "scripts/replay.py", *map(str, arguments)], cwd=ROOT, capture_output=True, text=True,
        timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def followed(run: Path) -> dict[str, int]:
    """Replay a run, require that all is equal, and return the numbers of the last lines."""
    status, said = replay("--run", run)
    assert status == 0, said
    numbers = re.findall(
        r"(\d+) of (\d+) batches .*: (\d+) tokens .* \((\d+) calls .*\), (\d+) metrics, (\d+) checkpoints", said
    )
    equal, batches, tokens, interrupted, metrics, checkpoints = map(int, numbers[0])
    assert equal == batches
    assert metrics > 60 * batches
    left_out = re.findall(r"(\d+) groups were not sampled", said)
    return {"tokens": tokens, "interrupted": interrupted, "checkpoints": checkpoints, "left out": int([*left_out, 0][0])}


@pytest.fixture(scope="module")
def run(demo: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    root = tmp_path_factory.mktemp("recorded")
    train(*demo, *RECORDED, *SLOW, "updates=4", f"run_root={root}", "run_name=whole")
    return root / "whole"


def test_a_run_with_slow_tools_is_followed(run: Path) -> None:
    found = followed(run)
    sampled = [
        len(call.sampled_ids)
        for path in (run / "rollouts").iterdir()
        for rollout in read_rollouts(path)
        for call in rollout.calls
    ]
    assert found["tokens"] == sum(sampled)
    assert found["interrupted"] > 0, "no call was sampled by several weights, so nothing was proven"
    assert found["checkpoints"] == 4
