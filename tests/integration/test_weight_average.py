"""The moving average of the policy on real ranks: the values of one process, under ZeRO-2 and ZeRO-3, also resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.ranks import accelerate, run_ranks
from tests.integration.workers.weight_average import DECAY

WORKER = Path(__file__).parent / "workers" / "weight_average.py"

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


def seen_by(launcher: str, directory: Path, source: Path | None = None) -> list[dict[str, Any]]:
    given = (directory, *([] if source is None else [source]))
    done = run_ranks(accelerate(launcher) if launcher else (), WORKER, *given, timeout_s=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads((directory / "seen.json").read_text())


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    directory = tmp_path_factory.mktemp("alone")
    return directory / "checkpoints", seen_by("", directory)


def check_formula(seen: list[dict[str, Any]]) -> None:
    """Compare the averages with those of the policies before them, and what is not in the module with what was."""
    by_hand = seen[0]["policy"]
    for one in seen[1:]:
        by_hand = {
            name: [DECAY * old + (1 - DECAY) * new for old, new in zip(by_hand[name], values, strict=True)]
            for name, values in one["policy"].items()
        }
        for name, values in by_hand.items():
            assert one["average"][name] == pytest.approx(values, abs=1e-6)
    for one in seen:
        assert one["policy_after"] == one["policy"], "bit for bit"
        assert one["policy_outputs_after"] == one["policy_outputs"], "also where a forward pass reads them"
    assert all(one["average_outputs"] != one["policy_outputs"] for one in seen[1:])


def test_one_process_averages_by_the_formula(alone: tuple[Path, list[dict[str, Any]]]) -> None:
    check_formula(alone[1])


@pytest.mark.parametrize("launcher", ["zero3", "zero2"])
def test_two_ranks_average_as_one_does_and_go_on_from_each_others_checkpoints(
    launcher: str, alone: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    checkpoints, expected = alone
    seen = seen_by(launcher, tmp_path / "two")
    check_formula(seen)
    for one, other in zip(seen, expected, strict=True):
        for name, values in other["average"].items():
            assert one["average"][name] == pytest.approx(values, abs=1e-5)
        assert one["average_outputs"] == pytest.approx(other["average_outputs"], abs=1e-4)

    resumed = seen_by(launcher, tmp_path / "resumed", tmp_path / "two" / "checkpoints" / "step-3")
    assert resumed[1:] == seen[3:], "bit for bit on the same ranks"
    from_one = seen_by(launcher, tmp_path / "from_one", checkpoints / "step-3")
    assert from_one[1]["average"] == expected[3]["average"], "loaded bit for bit"
    to_one = seen_by("", tmp_path / "to_one", tmp_path / "two" / "checkpoints" / "step-3")
    assert to_one[1]["average"] == seen[3]["average"], "loaded bit for bit"
