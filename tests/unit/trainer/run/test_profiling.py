"""Traces with `profile=true`."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from lockstep.trainer.run.profiling import StepProfiler
from lockstep.trainer.stopwatch import Stopwatch


def run(directory: Path, *, steps: int, made: int) -> list[str]:
    """Profile some steps of work. Returns the printed messages."""
    said: list[str] = []
    profiler = StepProfiler(directory, rank=0, steps=steps, say=said.append)
    for _ in range(made):
        with profiler.step(), Stopwatch().stage("update"):
            torch.mm(torch.ones(8, 8), torch.ones(8, 8))
    profiler.close()
    return said


@pytest.mark.parametrize(("steps", "made", "traced"), [(1, 4, 1), (2, 4, 2), (3, 2, 1)])
def test_steps_after_the_first_are_traced_with_their_stages(tmp_path: Path, steps: int, made: int, traced: int):
    (said,) = run(tmp_path / "profile", steps=steps, made=made)
    events = json.loads(gzip.decompress((tmp_path / "profile/rank-0.json.gz").read_bytes()))["traceEvents"]
    names = [event.get("name") for event in events if event.get("ph") == "X"]
    assert names.count("lockstep/update") == names.count("aten::mm") == traced
    assert "aten::mm" in said
    assert "lockstep/" not in said
    table = (tmp_path / "profile/rank-0.txt").read_text()
    assert "aten::mm" in table
    assert "Self CPU" in table


def test_nothing_is_written_when_off_or_after_a_single_step(tmp_path: Path):
    assert run(tmp_path / "off", steps=0, made=3) == []
    assert run(tmp_path / "short", steps=1, made=1) == []
    assert list(tmp_path.iterdir()) == []
