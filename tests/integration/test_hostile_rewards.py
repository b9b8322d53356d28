"""One run of the demo with faulty rewards: it continues, and each outcome is counted under its name, none as a zero.

No process is left, and the run listens on loopback only.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from lockstep.rewards.outcomes import ERRORS
from lockstep.rollout.records import Rollout, RolloutStatus
from lockstep.rollout.saved_rollouts import read_rollouts
from tests.fixtures.hostile_rewards import CASES
from tests.fixtures.sockets import Seen, watched
from tests.integration.test_run import ROOT, command, demo, metrics  # noqa: F401  # `demo` is a fixture

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

FILE = "tests/fixtures/hostile_rewards.py"
ROLLOUTS = 16


@pytest.fixture(scope="module")
def hostile(demo: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, Seen]:  # noqa: F811
    """The finished run, its output, and the observed processes and sockets."""
    root = tmp_path_factory.mktemp("runs")
    overrides = (
        *demo, "updates=2", f"run_root={root}", "run_name=hostile", f"rollout.prompts_per_step={ROLLOUTS // 4}",
        "rollout.samples_per_prompt=4", f"reward.functions=[{FILE}:hostile,{FILE}:impatient]",
        f"reward.settings.impatient.trace={root}/trace", "reward.timeout_s=10", "reward.workers=3",
        "reward.memory_gib=2", "reward.max_error_rate=1.0", "logger.print_rollouts=0",
    )  # fmt: skip
    with (root / "output").open("w") as output:
        process = subprocess.Popen(
            command(*overrides), cwd=ROOT, stdout=output, stderr=output, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    try:
        with watched(process.pid) as seen:
            process.wait(timeout=600)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    said = (root / "output").read_text()
    assert process.returncode == 0, said[-6000:]
    return root / "hostile", said, seen


def steps(run: Path) -> list[list[Rollout]]:
    return [list(read_rollouts(path)) for path in sorted((run / "rollouts").glob("step-*.jsonl"))]


def test_the_run_goes_on_to_its_end(hostile: tuple[Path, str, Seen]) -> None:
    lines = metrics(hostile[0])
    assert [line["step"] for line in lines] == [0, 1, 2], "the first batch had no reward at all, and trained nothing"
    assert [line["rollout/delivered"] for line in lines] == [0] + 2 * [ROLLOUTS - 8]


def test_every_outcome_counts_under_its_own_name(hostile: tuple[Path, str, Seen]) -> None:
    expected = Counter(outcome for _, outcome in CASES.values() if outcome is not None)
    for line in metrics(hostile[0]):
        found = {outcome: line[f"reward/errors/{outcome}"] for outcome in ERRORS}
        too_few = ROLLOUTS if line["step"] == 0 else 0
        assert found == {outcome: expected[outcome] for outcome in ERRORS} | {"wrong_length": too_few}


def test_no_failed_reward_is_a_zero(hostile: tuple[Path, str, Seen]) -> None:
    first, *others = steps(hostile[0])
    assert all(rollout.status is RolloutStatus.FAILED for rollout in first)
    for rollouts in others:
        assert len(rollouts) == ROLLOUTS
        for rollout in rollouts:
            outcome = CASES.get(rollout.rollout_id, (None, None))[1]
            if outcome is None:
                assert rollout.status is not RolloutStatus.FAILED
                assert rollout.reward == pytest.approx(sum(rollout.rewards.values()))
                assert rollout.reward > 0.3
            else:
                assert rollout.status is RolloutStatus.FAILED
                assert f"hostile: {outcome}" in str(rollout.error)
                assert rollout.rewards == {}


def test_rollouts_are_not_changed_by_a_reward_function(hostile: tuple[Path, str, Seen]) -> None:
    for rollouts in steps(hostile[0]):
        assert all(rollout.example for rollout in rollouts)
        assert "[changed]" not in json.dumps([list(rollout.messages) for rollout in rollouts], default=str)


def test_no_process_is_left_behind(hostile: tuple[Path, str, Seen]) -> None:
    assert len(hostile[2].family) > 5, "the run, its engine, its workers"
    deadline = time.monotonic() + 30
    while left := [pid for pid in hostile[2].family if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def test_nothing_listens_beyond_loopback_during_the_run(hostile: tuple[Path, str, Seen]) -> None:
    assert hostile[2].listening, "weight sync listens somewhere"
    assert hostile[2].reachable == []


def test_the_run_prints_the_user_code_that_it_runs(hostile: tuple[Path, str, Seen]) -> None:
    said = " ".join(hostile[1].split())
    assert f"code of your files, run with your rights: {FILE}:hostile, {FILE}:impatient" in said
