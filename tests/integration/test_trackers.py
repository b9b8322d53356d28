"""A run with several trackers: each has every update once, also after a resume from an older checkpoint."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

from tests.fixtures import wandb_files
from tests.integration.test_run import SMALL, demo, metrics, train  # noqa: F401  # `demo` is a fixture

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

SECRET = "3f9a1c55d0e84b7799aa"
REWARD = """
def reward(completions, *, api_key, **_):
    return [float(index % 3) for index in range(len(completions))]
"""


def test_trackers_have_each_update_once_and_no_secret(demo: tuple[str, ...], tmp_path: Path) -> None:  # noqa: F811
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (tmp_path / "reward.py").write_text(REWARD)
    name = f"{tmp_path}/reward.py:reward"
    settings = (
        *demo, *SMALL, f"run_root={tmp_path}", "run_name=tracked", "checkpoint.every=2", "checkpoint.keep=2",
        "logger=[wandb,tensorboard]", "logger.wandb=offline", f"reward.functions=['{name}']",
        f"reward.settings.reward.api_key={SECRET}", "reward.isolation=thread", "data.heldout_path=null",
    )  # fmt: skip
    run = tmp_path / "tracked"
    output = train(*settings, "updates=4")
    assert "tensorboard --logdir" in output
    assert {row["_step"] for row in wandb_files.history(run)} >= {1, 2, 3, 4}
    shutil.rmtree(max((run / "checkpoints").iterdir(), key=lambda path: path.name))
    train(*settings, "updates=6", "resume=auto")

    events = event_accumulator.EventAccumulator(str(run / "trackers" / "tensorboard"), {"scalars": 0})
    events.Reload()
    last = {int(line["step"]): line for line in metrics(run) if "reward/mean" in line}  # repeated updates: the later
    assert sorted(last) == [1, 2, 3, 4, 5, 6]
    for metric in ("reward/mean", "rollout_correction/kl", "policy/loss"):
        shown = {event.step: event.value for event in events.Scalars(metric)}
        assert shown == pytest.approx({update: line[metric] for update, line in last.items()}, rel=1e-6)
    finite = {key for line in last.values() for key, value in line.items() if math.isfinite(value)}
    assert finite - {"step", "time/timestamp"} <= set(events.Tags()["scalars"])

    for file in (path for path in run.rglob("*") if path.is_file() and "checkpoints" not in path.parts):
        assert SECRET.encode() not in file.read_bytes(), file
