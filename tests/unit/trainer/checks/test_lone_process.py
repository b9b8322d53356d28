"""`accelerate launch` that starts one process in place of several."""

from __future__ import annotations

import pytest

from lockstep.trainer.checks import lone_process


@pytest.mark.parametrize(
    ("words", "processes"),
    [
        ("accelerate launch --num_processes 2 train.py", 2),
        ("accelerate launch --cpu --num-processes=4 train.py", 4),
        ("accelerate launch --num_processes 1 train.py", None),
        ("accelerate launch train.py", None),
        ("my_launcher --num_processes 2", None),
        ("", None),
    ],
)
def test_a_launcher_that_started_fewer_processes_than_asked_is_refused(
    monkeypatch: pytest.MonkeyPatch, words: str, processes: int | None
) -> None:
    monkeypatch.setattr(lone_process, "_command_of_parent", words.split)
    problems = list(lone_process.lone_process_problems())
    assert [f"was asked for {processes} processes and started one" in problem for problem in problems] == (
        [True] if processes else []
    )
