"""A rank that hangs: the run ends at its deadline, and the stacks of all ranks show which rank waited for which."""

import time
from pathlib import Path

import pytest

from tests.fixtures.ranks import accelerate, run_ranks

WORKER = Path(__file__).parent / "workers" / "hanging_rank.py"


@pytest.mark.distributed
def test_a_hang_ends_the_run_with_the_stacks_of_all_ranks(tmp_path: Path) -> None:
    started = time.monotonic()
    done = run_ranks(accelerate("ddp"), WORKER, tmp_path, timeout_s=250)
    assert done.returncode != 0
    assert time.monotonic() - started < 200
    assert "barrier" in (tmp_path / "logs" / "stacks-rank-0.txt").read_text()
    assert "lost_in_thought" in (tmp_path / "logs" / "stacks-rank-1.txt").read_text()
    for rank in (0, 1):
        assert f"rank {rank}: step of update 1 has taken 3 s" in done.stderr
