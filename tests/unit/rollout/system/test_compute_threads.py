"""The wait of torch's compute threads: set before torch reads it, and left to users who choose it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lockstep.rollout.system.compute_threads import CHOICES, wait_briefly

LOADS_TORCH = (
    "from lockstep.trainer.cli import launch\nlaunch(lambda config: __import__('torch'), check=lambda config: None)"
)


def environment_of(variables: dict[str, str]) -> dict[str, str]:
    dropped = {*CHOICES, "LD_PRELOAD"}  # vLLM, in tests before this one, asks for libgomp before Python starts
    return {name: value for name, value in os.environ.items() if name not in dropped} | variables


@pytest.mark.parametrize(
    ("variables", "expected"),
    [({}, "GOMP_SPINCOUNT = '1000'"), ({"GOMP_SPINCOUNT": "77"}, "GOMP_SPINCOUNT = '77'")],
)
def test_torch_of_a_launched_command_waits_as_told(variables: dict[str, str], expected: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADS_TORCH],
        env=environment_of(variables) | {"OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert expected in done.stderr, done.stderr[-2000:]


def test_a_chosen_policy_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    wait_briefly()
    assert "GOMP_SPINCOUNT" not in os.environ
