"""A rank that hangs: the run ends when it is asked to, and the stacks of every rank say who waited for whom."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).parent / "workers" / "hanging_rank.py"


@pytest.mark.distributed
def test_a_hang_ends_the_run_with_the_stacks_of_all_ranks(tmp_path: Path) -> None:
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "configs/accelerate/ddp.yaml",
         "--num_processes", "2", "--main_process_port", "0", str(WORKER), str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=250, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode != 0
    assert time.monotonic() - started < 200
    assert "barrier" in (tmp_path / "logs" / "stacks-rank-0.txt").read_text()
    assert "lost_in_thought" in (tmp_path / "logs" / "stacks-rank-1.txt").read_text()
    for rank in (0, 1):
        assert f"rank {rank}: step of update 1 has taken 3 s" in done.stderr
