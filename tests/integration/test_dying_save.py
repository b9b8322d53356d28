"""A rank that dies in a save: the other ranks end too, and the checkpoint before remains."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from lockstep.trainer.checkpoint import checkpoint, stored
from tests.fixtures.ranks import accelerate, run_ranks

WORKER = Path(__file__).parent / "workers" / "dying_save.py"


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_a_rank_that_dies_in_a_save_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    started = time.monotonic()
    done = run_ranks(accelerate("zero3"), WORKER, tmp_path, timeout_s=280)
    assert done.returncode != 0
    assert "came to an end" not in done.stderr
    assert time.monotonic() - started < 200, "the other rank waited for the dead one"
    assert (tmp_path / f"{checkpoint.PARTIAL}2").is_dir(), "the rank died elsewhere"
    path, skipped = stored.find("auto", tmp_path)
    assert path == tmp_path / "step-1"
    assert skipped == [f"{checkpoint.PARTIAL}2: was never finished"]
