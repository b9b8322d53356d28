"""Metrics and rollouts that `lockstep inspect-run` shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.lab.inspect_run import Selection, is_frequent, show_run
from lockstep.rollout.records import Rollout, RolloutStatus
from lockstep.rollout.saved_rollouts import write_rollouts
from tests.unit.lab.pages.test_run_report import rollout as written


def rollout(number: int, reward: float, *, failed: bool = False) -> Rollout:
    lost = {"status": RolloutStatus.FAILED, "error": "the tool is gone"} if failed else {}
    return written(number, reward, f"answer {number}", **lost)


ROLLOUTS = [rollout(0, 0.5), rollout(1, 1.0), rollout(2, 0.0, failed=True), rollout(3, 0.25), rollout(4, -1.0)]


@pytest.mark.parametrize(
    ("selection", "ids"),
    [
        ({}, [1, 4]),
        ({"worst": 2}, [4, 3]),
        ({"best": 2}, [1, 0]),
        ({"best": 1, "worst": 1}, [1, 4]),
        ({"failed": True}, [2]),
        ({"best": 9, "worst": 9, "failed": True}, [1, 0, 3, 4, 2]),
        ({"rollout_id": 3, "worst": 2}, [3]),
        ({"rollout_id": 9}, []),
    ],
)
def test_rollouts_are_chosen_by_their_rewards(selection: dict, ids: list[int]):
    assert [one.rollout_id for one in Selection(**selection).of(ROLLOUTS)] == ids


def test_the_rollouts_of_a_step_without_trainable_ones_are_shown():
    lost = [one for one in ROLLOUTS if not one.is_trainable]
    assert Selection().of(lost) == lost
    assert Selection(worst=3).of(lost) == []


def test_a_dozen_metrics_are_shown_and_all_if_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    metrics = {
        "reward/mean": 0.5,
        "reward/own/mean": 0.5,
        "environment/tool_errors": 0.1,
        "rollout_correction/ess": 1.0,
    }
    others = {"reward/own/max": 1.0, "time/update": 2.0, "rollout_correction/k3_kl": 1e-9}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, **metrics, **others}) + "\n")
    (tmp_path / "rollouts").mkdir()
    write_rollouts(tmp_path / "rollouts/step-000001.jsonl", ROLLOUTS)
    assert all(map(is_frequent, metrics))
    for all_metrics in (False, True):
        selection = Selection(failed=True)
        status = show_run(tmp_path, step=None, selection=selection, all_metrics=all_metrics, with_tokens=False)
        shown = capsys.readouterr().out
        assert status == 0
        assert all(name in shown for name in metrics)
        assert all((name in shown) == all_metrics for name in others)
        assert ("3 more with --metrics" in shown) != all_metrics
        assert "the tool is gone" in shown
        assert "answer 2" in shown
        assert "answer 1" not in shown
