"""scripts/replay.py on a run with all checkpoints gives the same numbers bit for bit, and the same tokens."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.fixtures.forked_python import forked_python
from tests.integration.test_run import ROOT, demo, train  # noqa: F401  # `demo` is a fixture

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def run(demo: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """Run fourteen updates; those above the median of the gradient norms are dumped."""
    root = tmp_path_factory.mktemp("runs")
    train(
        *demo, "updates=14", f"run_root={root}", "run_name=whole", "rollout.prompts_per_step=4",
        "rollout.samples_per_prompt=4", "algorithm.minibatches=2", "checkpoint.every=1", "checkpoint.keep=99",
        "optimizer.spike=dump", "optimizer.spike_factor=1.0", "logger.print_rollouts=0",
    )  # fmt: skip
    return root / "whole"


def replay(*arguments: object) -> tuple[int, str]:
    done = subprocess.run(
        [forked_python(), "scripts/replay.py", *map(str, arguments)], cwd=ROOT, capture_output=True, text=True,
        timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("step", [2, 8])
def test_a_replayed_step_gives_the_same_bits(run: Path, step: int) -> None:
    status, said = replay(run, "--step", step)
    assert status == 0, said
    equal, compared = re.findall(r"(\d+) of (\d+) numbers are equal", said)[0]
    assert equal == compared
    assert int(compared) > 30
    assert "optim/grad_norm" in said


def test_a_dumped_optimizer_step_gives_the_same_bits(run: Path) -> None:
    dumps = {int(path.name.split("-")[1]): path for path in (run / "dumps").iterdir()}
    # A batch makes two updates and is saved after the second: only the first of them starts from a checkpoint.
    exact = [path for update, path in dumps.items() if update % 2]
    assert exact, f"no dump among {sorted(dumps)} is the first update of its batch"
    status, said = replay(exact[0])
    assert status == 0, said
    assert "2 of 2 numbers are equal" in said


def test_the_prompts_of_a_step_give_the_same_tokens(run: Path) -> None:
    status, said = replay(run, "--step", 8, "--sample")
    assert status == 0, said
    assert "16 of 16 rollouts have the same tokens" in said


def test_other_settings_give_other_numbers(run: Path) -> None:
    status, said = replay(run, "--step", 8, "algorithm.entropy_coef=0.5")
    assert status == 0, said
    assert re.search(r"optim/grad_norm .* differs", said)


def test_missing_files_and_options_are_named(run: Path) -> None:
    for arguments, expected in (
        ((run,), "add --step"),
        ((next((run / "dumps").iterdir()), "--sample"), "--sample needs"),
        ((run, "--step", 99), "found step-000002 to step-000014"),
        ((run / "nothing", "--step", 1), "config.yaml"),
        ((run, "--step", 8, "--sample", "rollout.max_staleness=2"), "this run sampled ahead"),
    ):
        status, said = replay(*arguments)
        assert status == 2
        assert expected in said
        assert "Traceback" not in said
