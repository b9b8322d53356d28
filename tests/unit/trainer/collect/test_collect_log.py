"""The log of rollouts made ahead: what is read is what was written, and a resumed run drops what came later."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from lockstep.trainer.collect.collect_log import Collection, CollectLog, Round, read_log


def line(step: int, *, begins: str | None = None) -> Collection:
    rounds = [
        Round(arrived=[], dropped=[], silent=[], begun=[3 * step, 3 * step + 1]),
        Round(arrived=[[3 * step, step]], dropped=[7], silent=[9], begun=[]),
    ]
    return Collection(step=step, version=step, begins=begins, is_alone=True, rounds=rounds, batch=[3 * step])


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "asynchrony.jsonl"
    log = CollectLog(path)
    lines = [line(0, begins="start"), line(1)]
    for one in lines:
        log.append(one)
    assert list(read_log(path)) == lines
    assert lines[1].delivered == [3, 9]


def test_another_process_drops_later_and_torn_lines(tmp_path: Path) -> None:
    path = tmp_path / "asynchrony.jsonl"
    first = CollectLog(path)
    for step in range(4):
        first.append(line(step))
    with path.open("a") as file:
        file.write('{"step": 4, "version"')
    CollectLog(path).append(line(2, begins="start"))
    assert [(one.step, one.begins) for one in read_log(path)] == [(0, None), (1, None), (2, "start")]


@pytest.mark.parametrize("text", ["[]", "{}", '{"step": "0"}', "null", "1", '{"rounds": [[1]]}', "\x00"])
def test_other_lines_are_left_out(text: str, tmp_path: Path) -> None:
    path = tmp_path / "asynchrony.jsonl"
    log = CollectLog(path)
    log.append(line(0))
    with path.open("a") as file:
        file.write(f"{text}\n")
    log.append(line(1))
    assert [one.step for one in read_log(path)] == [0, 1]


def test_a_log_that_cannot_be_written_is_given_up_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = CollectLog(tmp_path)  # a directory
    with caplog.at_level(logging.WARNING):
        log.append(line(0))
        log.append(line(1))
    assert len(caplog.records) == 1
    assert "cannot be replayed" in caplog.text
