"""A resumed asynchronous source: it repeats the batches after its checkpoint, and goes on with the groups in flight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.rollout.errors import DataError
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.trainer.checkpoint.run_dir import RunDirectory
from lockstep.trainer.collect.collect_log import CollectLog, read_log
from lockstep.trainer.collect.groups import Collected
from lockstep.trainer.collect.kept_batches import KeptBatches
from lockstep.trainer.data.prompts import Position
from lockstep.trainer.stopwatch import Stopwatch
from tests.unit.trainer.collect.test_async_source import Run


class Resumable(Run):
    """A process of a run in a directory; `train` is one step."""

    def __init__(self, loop: BackgroundLoop, path: Path, **settings: Any) -> None:
        super().__init__(loop, **settings)
        directory, self.said = RunDirectory(path), list[str]()
        (directory.checkpoints / "step-0").mkdir(parents=True, exist_ok=True)
        (directory.checkpoints / "step-0/manifest.json").write_text('{"state": {"step": 0}}')
        self.directory = directory
        self.producer._store = KeptBatches(directory, self.said.append)
        self.producer._log = CollectLog(directory.asynchrony)
        self.step = 0

    def collect(self) -> Collected:
        collected = self.producer.collect(self.step, self.sampler.version, Stopwatch(), self.shown.append)
        self.step += 1
        return collected

    @property
    def state(self) -> tuple[int, int, Position]:
        return self.step, self.sampler.version, self.prompts.position

    def resumed(self, state: tuple[int, int, Position], **settings: Any) -> Resumable:
        """Return another process of the run that begins at a checkpoint."""
        self.producer.close()
        again = Resumable(self.loop, self.directory.path, **settings)
        again.step, again.sampler.version, position = state
        again.prompts.resume(position, {}, again.prompts.sizes)
        return again

    @property
    def lines(self) -> list[Any]:
        return list(read_log(self.directory.asynchrony))


@pytest.fixture
def loop() -> Iterator[BackgroundLoop]:
    with BackgroundLoop() as loop:
        yield loop


def test_batches_after_a_checkpoint_are_repeated_and_groups_in_flight_go_on(
    loop: BackgroundLoop, tmp_path: Path
) -> None:
    run = Resumable(loop, tmp_path, max_staleness=2)
    run.hold(1)
    assert run.train() == [0, 2, 3]
    state = run.state
    run.settle()
    collected = [run.collect(), run.collect()]
    lines, position = run.lines, run.prompts.position
    again = run.resumed(state, max_staleness=2)
    assert [again.collect(), again.collect()] == collected
    assert again.sampler.begun == [], "a repeated batch is not sampled"
    assert again.prompts.position == position
    assert again.lines == lines
    again.sampler.version = 3
    again.train()
    assert [line.begins for line in again.lines] == ["start", None, None, None]
    in_flight = [place for place in position.unfinished if place not in again.lines[3].rounds[0].begun]
    assert 1 in in_flight
    complete = {place for line in lines for one in line.rounds for place, _ in one.arrived}
    unfinished = [place for place in in_flight if place not in complete]
    assert again.sampler.begun[: len(unfinished)] == unfinished


def test_a_complete_group_waits_with_its_rewards(loop: BackgroundLoop, tmp_path: Path) -> None:
    run = Resumable(loop, tmp_path, reward=lambda rollout: 0.25)
    run.collect()
    run.settle()
    run.collect()  # the groups of the third batch arrive in its only round, or begin
    state, in_flight = run.state, run.prompts.unfinished
    again = run.resumed(state, reward=lambda rollout: 0.75)
    complete = {work.place for work in run.producer._works if work.is_complete}
    collected = again.collect()
    assert {rollout.group_id for rollout in collected.rollouts} <= {*in_flight}
    for rollout in collected.rollouts:
        assert rollout.reward == (0.25 if rollout.group_id in complete else 0.75)


def test_without_kept_batches_all_groups_begin_again(loop: BackgroundLoop, tmp_path: Path) -> None:
    run = Resumable(loop, tmp_path)
    run.collect()
    state = run.state
    run.settle()
    run.collect()
    run.producer._store.write_calls({3: []})  # type: ignore[union-attr]
    for path in run.directory.batches.glob("0*"):
        path.unlink()
    again = run.resumed(state)
    again.collect()
    assert [line.begins for line in again.lines] == ["start", "start"]
    assert again.sampler.begun[:3] == [*state[2].unfinished]
    assert again.said == [
        "batches after the checkpoint that were not kept, and are collected again: 1",
        "groups in flight that were not kept, and are sampled again: 3",
    ]
    assert not (run.directory.batches / "calls.jsonl").exists(), "the calls are of groups that began before"


def test_a_log_that_does_not_fit_the_checkpoint_is_said(loop: BackgroundLoop, tmp_path: Path) -> None:
    run = Resumable(loop, tmp_path)
    run.collect()
    step, version, position = run.state
    again = run.resumed((step, version, replace(position, unfinished=position.unfinished[:-1])))
    again.collect()
    assert "no log that leads to the checkpoint" in again.said[0]
    assert [line.begins for line in again.lines] == ["start", "start"]


def test_an_engine_that_is_lost_while_batches_are_repeated_ends_the_repetition(
    loop: BackgroundLoop, tmp_path: Path
) -> None:
    run = Resumable(loop, tmp_path)
    run.collect()
    state = run.state
    for _ in range(3):
        run.settle()
        run.collect()
    again = run.resumed(state)
    again.collect()
    again.producer.forget()
    again.settle()
    again.collect()
    assert [(line.step, line.begins) for line in again.lines] == [(0, "start"), (1, None), (2, "start")]
    assert again.sampler.begun, "the third batch is sampled again"


def test_a_run_that_begins_again_forgets_its_batches(loop: BackgroundLoop, tmp_path: Path) -> None:
    run = Resumable(loop, tmp_path)
    for _ in range(3):
        run.collect()
        run.settle()
    again = run.resumed((0, 0, Position()))
    again.collect()
    assert [line.step for line in again.lines] == [0]
    assert [path.name for path in sorted(again.directory.batches.iterdir())] == ["000000.jsonl"]


def test_other_data_end_the_run(loop: BackgroundLoop, tmp_path: Path) -> None:
    run = Resumable(loop, tmp_path, rows=4, weighting="learnability")
    run.collect()
    state = run.state
    run.settle()
    run.collect()
    again = run.resumed(state, rows=4, weighting="learnability")
    again.prompts.cursor += 1
    with pytest.raises(DataError, match=r"batch 2 began the rows .* remove the folder batches"):
        again.collect()


def test_a_second_kill_while_batches_are_repeated_changes_nothing(loop: BackgroundLoop, tmp_path: Path) -> None:
    run = Resumable(loop, tmp_path)
    run.collect()
    state = run.state
    collected = []
    for _ in range(3):
        run.settle()
        collected.append(run.collect())
    lines = run.lines
    once = run.resumed(state)
    once.collect()
    twice = once.resumed(state)
    assert [twice.collect() for _ in range(3)] == collected
    assert twice.lines == lines
