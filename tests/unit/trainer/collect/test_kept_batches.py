"""Kept batches: read back as they were, of the course in the log alone, and no longer than a checkpoint needs them."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.rollout.errors import DataError
from lockstep.rollout.records import EngineCall, FinishReason, Rollout, VersionSpan
from lockstep.rollout.saved_rollouts import to_json
from lockstep.trainer.checkpoint.run_dir import RunDirectory
from lockstep.trainer.collect.call_journal import Key
from lockstep.trainer.collect.collect_log import Collection, CollectLog, Round
from lockstep.trainer.collect.groups import Collected
from lockstep.trainer.collect.kept_batches import KeptBatches, calls_of, complete_of

EVENTS = Round(arrived=[], dropped=[], silent=[], begun=[])


def line(step: int, batch: Sequence[int] = (), *, begins: str | None = None, **events: list[int]) -> Collection:
    return Collection(step, step, begins, is_alone=True, rounds=[EVENTS._replace(**events)], batch=list(batch))


def group(place: int) -> tuple[Rollout, ...]:
    call = EngineCall(
        prompt_ids=(1, 2),
        sampled_ids=(3, 4),
        sampled_logprobs=(-1 / 3, -math.pi),
        finish_reason=FinishReason.STOP,
        version_spans=(VersionSpan(version=place, start=0, end=2),),
    )
    return tuple(
        Rollout(rollout_id=2 * place + i, group_id=place, calls=(call,), reward=0.1 * i, rewards={"r": 0.1 * i})
        for i in range(2)
    )


def collected(*places: int, silent: Sequence[int] = ()) -> Collected:
    rollouts = [rollout for place in sorted([*places, *silent]) for rollout in group(place)]
    trained = [rollout for place in places for rollout in group(place)]
    return Collected(
        rollouts=tuple(rollouts), trained=tuple(trained), greedy_rewards={places[0]: 0.5}, metrics={"a/b": 1 / 3}
    )


class Run:
    def __init__(self, path: Path) -> None:
        self.directory, self.said = RunDirectory(path), list[str]()
        self.kept = KeptBatches(self.directory, self.said.append)
        self.log = CollectLog(self.directory.asynchrony)

    def collect(self, one: Collection, *places: int) -> None:
        self.kept.write(one, collected(*(places or (0,))), {})
        self.log.append(one)

    def checkpoint(self, update: int, *, step: int) -> None:
        path = self.directory.checkpoints / f"step-{update}"
        path.mkdir(parents=True)
        (path / "manifest.json").write_text(json.dumps({"state": {"step": step}}))

    @property
    def names(self) -> list[str]:
        return sorted(path.name for path in self.directory.batches.iterdir())


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_what_is_read_is_what_was_written(run: Run) -> None:
    one = line(4, [7, 2], silent=[5])
    before = collected(7, 2, silent=[5])
    run.kept.write(one, before, {9: (group(9), group(9)[:1])})
    run.log.append(one)
    assert run.kept.count_from(4) == 1
    logged, after = run.kept.read(4)
    assert logged == one
    assert after == before
    assert [rollout.group_id for rollout in after.trained] == [7, 7, 2, 2]
    state = run.kept.in_flight_after(4)
    assert state is not None
    assert complete_of(state.complete["9"]) == (list(group(9)), list(group(9)[:1]))


def test_calls_of_groups_in_flight_are_read_back(run: Run) -> None:
    calls = [(Key(3, 1.0), group(1)[0].calls[0]), (Key(None, 0.5), replace(group(1)[0].calls[0], sampled_ids=(5, 6)))]
    run.collect(line(0, [0]))
    run.kept.write_calls({1: calls, 2: calls[:1]})
    state = run.kept.in_flight_after(0)
    assert state is not None
    assert {place: calls_of(values) for place, values in state.calls.items()} == {"1": calls, "2": calls[:1]}
    run.kept.forget_calls()
    state = run.kept.in_flight_after(0)
    assert state is not None
    assert not state.calls


def test_batches_are_repeated_up_to_the_last_of_the_log(run: Run) -> None:
    run.checkpoint(1, step=1)
    for step in range(4):
        run.collect(line(step, [0]))
    run.kept.write(line(4, [0]), collected(0), {})  # killed before its line
    assert [run.kept.count_from(step) for step in range(6)] == [4, 3, 2, 1, 0, 0]
    assert run.kept.in_flight_after(4) is None


def test_a_batch_of_a_course_that_was_left_is_not_repeated(run: Run) -> None:
    run.collect(line(0, [0]))
    run.collect(line(1, [0]), 0)
    CollectLog(run.directory.asynchrony).append(line(1, [3], begins="start"))
    assert run.kept.count_from(1) == 0
    assert run.kept.in_flight_after(1) is None


def test_batches_are_kept_as_long_as_a_checkpoint_needs_them(run: Run) -> None:
    run.checkpoint(2, step=2)
    run.checkpoint(4, step=4)
    for step in range(7):
        run.collect(line(step, [0]))
    assert run.names == [f"{step:06d}.jsonl" for step in range(1, 7)]
    (run.directory.checkpoints / "step-2/manifest.json").write_text("torn")
    run.collect(line(7, [0]))
    assert run.names == [f"{step:06d}.jsonl" for step in range(3, 8)]


def test_groups_in_flight_are_those_that_began_and_did_not_end(run: Run) -> None:
    run.log.append(line(0, [2, 0], begun=[0, 1, 2, 3, 4, 5], begins="start"))
    run.log.append(line(1, [6], begun=[6, 7], dropped=[1], silent=[3]))
    assert run.kept.in_flight_before(1) == [(1, 0), (3, 0), (4, 0), (5, 0)]
    assert run.kept.in_flight_before(2) == [(4, 0), (5, 0), (7, 1)]
    run.log.append(line(2, [], begun=[5, 4], begins="engine"))
    assert run.kept.in_flight_before(3) == [(5, 2), (4, 2)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"delivered": 1}',
        json.dumps({"delivered": to_json(group(3)[0])}),
        '{"delivered"',
    ],
)
def test_a_damaged_batch_says_what_to_remove(text: str, run: Run) -> None:
    run.collect(line(0, [0]))
    path = run.directory.batches / "000000.jsonl"
    header = path.read_text().splitlines(keepends=True)[0]
    path.write_text(header + text)
    with pytest.raises(DataError, match="remove the folder"):
        run.kept.read(0)


def test_a_changed_digit_is_found(run: Run) -> None:
    run.collect(line(0, [0]))
    run.kept.write_calls({1: [(Key(3, 1.0), group(1)[0].calls[0])]})
    for name, read in (("000000", lambda: run.kept.read(0)), ("calls", lambda: run.kept.in_flight_after(0))):
        path = run.directory.batches / f"{name}.jsonl"
        text = path.read_text()
        path.write_text(text.replace("-3.14159", "-3.14158"))
        with pytest.raises(DataError, match=r"not what was written.*remove the folder"):
            read()
        path.write_text(text)


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"line": 1}', '{"line": {"rounds": [[1]]}}', "\x00"])
def test_a_batch_without_its_line_is_not_repeated(text: str, run: Run) -> None:
    run.collect(line(0, [0]))
    (run.directory.batches / "000000.jsonl").write_text(text)
    assert run.kept.count_from(0) == 0


WITHOUT_CALLS = to_json(Rollout(rollout_id=0, group_id=0, calls=()))


@pytest.mark.parametrize(
    "values", [None, {}, {"keys": [[1]], "calls": {}}, {"keys": [[1, 1.0]], "calls": WITHOUT_CALLS}]
)
def test_damaged_calls_are_refused(values: object) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        calls_of(values)
    with pytest.raises(DataError, match="cannot be read"):
        complete_of(values)


def test_a_folder_that_cannot_be_written_is_given_up_with_one_warning(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run.directory.batches.write_text("a file")
    with caplog.at_level(logging.WARNING):
        run.collect(line(0, [0]))
        run.kept.write_calls({})
        run.collect(line(1, [0]))
    assert len(caplog.records) == 1
    assert run.kept.count_from(0) == 0
