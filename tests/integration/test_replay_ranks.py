"""scripts/replay.py on as many ranks as the run had gives the same numbers bit for bit, with a teacher's scores."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.integration.test_run import ROOT, command, demo, metrics, train  # noqa: F401  # `demo` is a fixture

pytestmark = [pytest.mark.engine, pytest.mark.distributed, pytest.mark.timeout(900)]


def test_a_step_of_two_ranks_gives_the_same_bits_on_two(demo: tuple[str, ...], tmp_path: Path) -> None:  # noqa: F811
    (model,) = (setting.partition("=")[2] for setting in demo if setting.startswith("model.path="))
    train(
        # One pass over the rows, so that rank 1 has half of them.
        *demo, "algorithm=opd_topk", "correction.noise_floor_every=0", f"teacher.path={model}", "updates=2",
        f"run_root={tmp_path}", "run_name=two", "rollout.prompts_per_step=4", "rollout.samples_per_prompt=4",
        "checkpoint.every=1", "checkpoint.keep=9", "logger.print_rollouts=0", ranks=2,
    )  # fmt: skip
    assert metrics(tmp_path / "two")[-1]["loss/teacher_tokens"] > 50
    launch = command(ranks=2)
    assert launch.pop() == "scripts/train.py"
    done = subprocess.run(
        [*launch, "scripts/replay.py", str(tmp_path / "two"), "--step", "2"],
        cwd=ROOT, capture_output=True, text=True, timeout=400, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    ((equal, compared),) = re.findall(r"(\d+) of (\d+) numbers are equal", said)
    assert equal == compared, said
    assert int(compared) > 30
    assert "teacher/top_mass" in said
