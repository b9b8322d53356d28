"""First and second signals during a save."""

from __future__ import annotations

import os
import signal
import subprocess
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.trainer.checkpoint import checkpoint, stored
from lockstep.trainer.run.run import Callbacks, Life
from tests.fixtures.forked_python import forked_python
from tests.fixtures.paths import ROOT

SAVES = """
    import sys, time
    from pathlib import Path
    from tests.fixtures.saved_state import SavedState
    from lockstep.trainer.checkpoint import checkpoint, stored
    from lockstep.trainer.run import interrupt
    from lockstep.trainer.checkpoint.checkpoint import TrainerState
    from lockstep.trainer.run.interrupt import Interrupt

    interrupt.ECHO_S = float(sys.argv[2])
    signals, saved, directory, update = Interrupt(), SavedState(), Path(sys.argv[1]), 0
    flush = checkpoint._fsync

    def slowly(path):
        if update == 2:
            print("saving", flush=True)
            time.sleep(0.2)
        flush(path)

    checkpoint._fsync = slowly
    while not signals.requested and update < 5:
        update += 1
        checkpoint.save(directory, TrainerState(step=update, update=update, data_cursor=0), saved, keep=9)
"""


def in_a_save(directory: Path, *, echo_s: float) -> subprocess.Popen[str]:
    """Start a process and return while it is in its second save."""
    process = subprocess.Popen(
        [forked_python(), "-c", textwrap.dedent(SAVES), str(directory), str(echo_s)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "saving\n"
    return process


def test_a_signal_in_a_save_lets_it_finish(tmp_path: Path) -> None:
    process = in_a_save(tmp_path, echo_s=60.0)
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    assert process.stderr.readline() == "\n"
    assert "finishing this update, then saving" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)  # as passed on by a launcher after the scheduler signaled the group
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert said == ""
    assert [path.name for path in stored.complete(tmp_path)[0]] == ["step-1", "step-2"]
    assert not list(tmp_path.glob(f"{checkpoint.PARTIAL}*"))


@pytest.mark.parametrize("again", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_exits_at_once(tmp_path: Path, again: signal.Signals) -> None:
    process = in_a_save(tmp_path, echo_s=0.1)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(again)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "exited at once" in said
    found, skipped = stored.complete(tmp_path)
    assert [path.name for path in found] == ["step-1"]
    assert [sentence.partition(":")[0] for sentence in skipped] == [".partial-step-2"]


class Ranks:
    """This rank and another one, which asks for what is given."""

    def __init__(self, *asked: float) -> None:
        self._asked = torch.tensor(asked)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor + self._asked


@pytest.mark.parametrize(
    ("asked", "stops", "is_terminated"), [((0, 0), False, False), ((1, 0), True, False), ((1, 1), True, True)]
)
def test_a_rank_knows_that_another_one_got_sigterm(asked: tuple[float, ...], stops: bool, is_terminated: bool) -> None:
    life: Any = object.__new__(Life)
    life._interrupt = SimpleNamespace(requested=False, terminated=False)
    life._wall_time = SimpleNamespace(is_over=False)
    life._distributed = Ranks(*asked)
    life._callbacks = Callbacks()
    assert (life._must_stop(), life.is_terminated) == (stops, is_terminated)
