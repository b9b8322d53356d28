"""Runs that are replayed as a whole: what is read, and what is refused before anything heavy starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.lab.run_replay.recorded_run import RecordedRun
from lockstep.rollout.errors import ConfigError, DataError
from lockstep.rollout.records import Rollout
from lockstep.rollout.saved_rollouts import write_rollouts
from lockstep.trainer.collect.collect_log import Collection, CollectLog, Round
from lockstep.trainer.observe.metrics_log import BATCH

BATCHES = (
    # begins, begun, batch, update after it
    ("start", [0, 1, 2, 3], [1, 0], 1),
    (None, [4], [2, 3], 1),  # trained nothing
    ("start", [4, 5], [4, 5], 2),
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three batches; the second trained nothing, and the process was killed after it."""
    log, update = CollectLog(tmp_path / "asynchrony.jsonl"), 0
    (tmp_path / "rollouts").mkdir()
    for step, (begins, begun, batch, after) in enumerate(BATCHES):
        rounds = [Round(arrived=[[place, 0] for place in batch], dropped=[], silent=[], begun=begun)]
        log.append(Collection(step=step, version=update, begins=begins, is_alone=True, rounds=rounds, batch=batch))
        name = f"step-{after:06d}{f'-untrained-{step + 1}' if after == update else ''}.jsonl"
        places = [place for place in sorted(batch) for _ in range(2)]
        rollouts = [Rollout(rollout_id=2 * p + i % 2, group_id=p, calls=()) for i, p in enumerate(places)]
        write_rollouts(tmp_path / "rollouts" / name, rollouts)
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": after, BATCH: step + 1}) + "\n")
        update = after
    return tmp_path


def test_a_group_has_the_rollouts_that_its_process_delivered(run: Path) -> None:
    recorded = RecordedRun(run)
    assert len(recorded.collections) == 3
    group = recorded.group(2, begun_in=0)
    assert group is not None
    assert [rollout.rollout_id for rollout in group] == [4, 5]
    assert recorded.group(4, begun_in=1) is None, "its process was killed"
    assert recorded.group(4, begun_in=2) is not None
    assert recorded.group(9, begun_in=0) is None


def test_a_batch_that_was_not_reported_is_left_out(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:2]))
    assert len(RecordedRun(run).collections) == 2


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda run: (run / "asynchrony.jsonl").unlink(), "a function of its seed: start it again"),
        (lambda run: (run / "asynchrony.jsonl").write_text(""), "has 0 whole batches and metrics.jsonl 3"),
        (
            lambda run: (run / "asynchrony.jsonl").write_text(
                "".join((run / "asynchrony.jsonl").read_text().splitlines(keepends=True)[1:])
            ),
            "expected the same from the first on: a fork",
        ),
        (
            lambda run: (run / "rollouts/step-000001-untrained-2.jsonl").unlink(),
            r"1 files of rollouts are missing, the first .*untrained-2.*; record with logger.save_rollouts=true",
        ),
    ],
)
def test_a_run_that_cannot_be_followed_is_refused(damage: Callable[[Path], None], sentence: str, run: Path) -> None:
    damage(run)
    with pytest.raises(ConfigError, match=sentence):
        RecordedRun(run)


def test_a_file_without_a_delivered_group_is_named(run: Path) -> None:
    path = run / "rollouts/step-000002.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    recorded = RecordedRun(run)
    assert recorded.group(4, begun_in=2)
    with pytest.raises(DataError, match=r"step-000002.jsonl has no rollouts of group 5"):
        recorded.group(5, begun_in=2)
