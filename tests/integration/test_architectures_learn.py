"""Runs of the demo's recipe with other architectures, on one process and on two ZeRO-3 ranks: each learns and agrees.

docs/models.md names the commands of whole runs.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from lockstep.demo.make import make_demo
from lockstep.demo.manifest import ARCHITECTURE_NAMES, DEFAULT_ARCHITECTURE
from tests.fixtures.composed import DEMO
from tests.integration.test_run import metrics, train

pytestmark = [pytest.mark.engine, pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(3600)]

UPDATES = 24


@pytest.fixture(scope="module", params=[name for name in ARCHITECTURE_NAMES if name != DEFAULT_ARCHITECTURE])
def recipe(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Overrides that name the model of an architecture after its warm start, and the data."""
    directory: Path = tmp_path_factory.mktemp(request.param)
    made = make_demo(
        "calculator", directory / "model", directory / "data/demo", 0, Console(file=io.StringIO()), request.param
    )
    own = (f"model.path={made.model_dir}", f"data.path={made.data_dir}/train.jsonl", f"run_root={directory}")
    return (DEMO, *own)


@pytest.mark.parametrize("ranks", [None, 2])
def test_the_reward_rises_and_engine_and_trainer_agree(recipe: tuple[str, ...], ranks: int | None) -> None:
    train(*recipe, f"updates={UPDATES}", f"run_name={ranks}", "checkpoint.every=0", ranks=ranks, timeout_s=3000)
    lines = [line for line in metrics(Path(recipe[-1].removeprefix("run_root=")) / str(ranks)) if "reward/mean" in line]
    assert [line["step"] for line in lines] == list(range(1, UPDATES + 1))
    rewards = [line["reward/mean"] for line in lines]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:2]) + 0.15, rewards
    for line in lines:
        assert line["rollout/token_match_rate"] == 1.0
        assert line["rollout_correction/logp_diff_abs_mean"] < 1e-4
        assert line["sync/canary_abs_diff"] < 1e-3
