"""A rank that dies in a save: the others end too, and what is left is the checkpoint before."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer import checkpoint

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).parent / "workers" / "dying_save.py"


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_a_rank_that_dies_in_a_save_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "configs/accelerate/zero3.yaml",
         "--num_processes", "2", "--main_process_port", "0", str(WORKER), str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode != 0
    assert "came to an end" not in done.stderr
    assert time.monotonic() - started < 200, "the other rank waited for the dead one"
    assert (tmp_path / f"{checkpoint.PARTIAL}2").is_dir(), "the rank died elsewhere"
    path, skipped = checkpoint.find("auto", tmp_path)
    assert path == tmp_path / "step-1"
    assert skipped == [f"{checkpoint.PARTIAL}2: was never finished"]
