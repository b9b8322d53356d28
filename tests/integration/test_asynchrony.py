"""Runs with rollouts made ahead: none too old is trained, none is lost or repeated, and runs end cleanly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from lockstep.rollout.saved_rollouts import read_rollouts
from tests.fixtures.processes import descendants
from tests.integration.test_run import ROOT, command, demo, metrics, train  # noqa: F401  # `demo` is a fixture

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

AHEAD = (
    "rollout.max_staleness=2",
    "environment=slow_calculator",
    "environment.settings.max_delay_s=0.5",
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "logger.print_rollouts_every=0",
)


def places(run: Path, *, up_to: int = 10**6) -> list[list[int]]:
    """Return the group ids of each update; a group id is the place of its prompt in the data."""
    files = sorted((run / "rollouts").glob("step-*.jsonl"))[:up_to]
    return [sorted({rollout.group_id for rollout in read_rollouts(file)}) for file in files]


@pytest.fixture(scope="module")
def run(demo: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    root = tmp_path_factory.mktemp("ahead")
    train(
        *demo, *AHEAD, "updates=6", f"run_root={root}", "run_name=whole", "checkpoint.every=3", "eval.every=3",
        "eval.prompts=4",
    )  # fmt: skip
    return root / "whole"


@pytest.mark.v2
def test_rollouts_are_made_ahead_and_never_too_old(run: Path) -> None:
    lines = metrics(run)
    assert [line["step"] for line in lines] == list(range(1, 7))
    lags = [line["rollout_correction/version_lag_max"] for line in lines]
    assert max(lags) == 2, lags
    assert lines[0]["rollout_correction/version_lag_max"] == 0
    for line in lines:
        assert line["rollout/delivered"] == 16, "groups are whole"
        assert line["rollout/token_match_rate"] == line["rollout/trained_fraction"] == 1.0
        assert line["rollout/dropped_stale"] == 0
        assert line["rollout/inflight"] + line["rollout/queue"] <= 2 * 16
        assert 0 <= line["perf/idle_frac"] <= 1
        assert line["time/wait"] >= 0
        assert line["sync/canary_abs_diff"] < 1e-3
    assert lines[2]["rollout/inflight"] + lines[2]["rollout/queue"] == 2 * 16
    assert lines[-1]["rollout/inflight"] + lines[-1]["rollout/queue"] == 0, "nothing is begun that is not trained"


@pytest.mark.v2
def test_tokens_carry_the_versions_that_sampled_them(run: Path) -> None:
    spans = [
        span
        for update in range(1, 7)
        for rollout in read_rollouts(run / "rollouts" / f"step-{update:06d}.jsonl")
        for call in rollout.calls
        for span in call.version_spans
        if update - 1 - span.version not in range(3)
    ]
    assert spans == []


@pytest.mark.v2
def test_every_prompt_is_trained_once(run: Path) -> None:
    trained = [place for step in places(run) for place in step]
    assert sorted(trained) == list(range(24))


def test_rollouts_in_flight_at_a_checkpoint_are_sampled_again_after_it(
    run: Path,
    demo: tuple[str, ...],  # noqa: F811
    tmp_path: Path,
) -> None:
    state = json.loads((run / "checkpoints/step-3/state.json").read_text())
    assert state["data_cursor"] == 12 + len(state["unfinished"])
    assert len(state["unfinished"]) == 8
    train(
        *demo, *AHEAD, "updates=6", f"run_root={tmp_path}", "run_name=resumed",
        f"resume={run / 'checkpoints/step-3'}",
    )  # fmt: skip
    before = [place for step in places(run, up_to=3) for place in step]
    after = [place for step in places(tmp_path / "resumed") for place in step]
    assert sorted([*before, *after]) == list(range(24))
    assert set(state["unfinished"]) <= set(after)


@pytest.mark.slow
def test_a_killed_engine_ends_a_run_without_restarts(
    demo: tuple[str, ...],  # noqa: F811
    tmp_path: Path,
) -> None:
    directory = tmp_path / "killed"
    process = subprocess.Popen(
        command(
            *demo, *AHEAD, "updates=500", f"run_root={tmp_path}", "run_name=killed", "rollout.engine_restarts=0"
        ),
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 240
        while not (directory / "metrics.jsonl").exists() or len(metrics(directory)) < 2:
            assert process.poll() is None, process.communicate()[0][-4000:]
            assert time.monotonic() < deadline
            time.sleep(0.2)
        engine = descendants(process.pid) - {process.pid}
        for pid in engine:
            os.kill(pid, signal.SIGKILL)
        output, _ = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode != 0
    assert "the engine is dead" in output, output[-4000:]
    assert "never retrieved" not in output
    assert "\nTraceback" not in output, output[-4000:]  # the end of the engine's log has one, quoted


@pytest.mark.distributed
def test_two_zero3_ranks_train_rollouts_made_ahead(
    demo: tuple[str, ...],  # noqa: F811
    tmp_path: Path,
) -> None:
    train(*demo, *AHEAD, "updates=4", f"run_root={tmp_path}", "run_name=two", ranks=2)
    lines = metrics(tmp_path / "two")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert 1 <= max(line["rollout_correction/version_lag_max"] for line in lines) <= 2
    assert sorted(place for step in places(tmp_path / "two") for place in step) == list(range(16))
