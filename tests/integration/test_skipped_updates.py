"""All ranks skip an update whose loss or gradient is not finite on one of them, and it changes nothing.

In one process, under DDP, ZeRO-2 and ZeRO-3.
"""

import json
from pathlib import Path

import pytest

from lockstep.trainer.config.groups.correction_settings import CorrectionConfig
from lockstep.trainer.update.batch_dumps import read_dump
from tests.fixtures.models import save_tiny_model
from tests.fixtures.ranks import accelerate, run_ranks

WORKER = Path(__file__).parent / "workers" / "skipped_updates.py"


@pytest.mark.distributed
@pytest.mark.parametrize("launcher", [None, "ddp", "zero2", "zero3"])
def test_a_broken_update_is_skipped_on_all_ranks_and_leaves_no_trace(launcher: str | None, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", tied=True)
    done = run_ranks(accelerate(launcher) if launcher else (), WORKER, model, tmp_path, timeout_s=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["skipped updates change nothing"]
    assert report["later updates are equal to those without them"]
    assert report["versions"] == [1, 2]
    assert report["counted"] == [0, 1, 2, 3, 3]
    first, second, first_again, second_again = report["grad_norms"]
    assert (first, second) == (first_again, second_again)
    assert first > 0
    assert report["spike_norm"] > 1e4 * first
    assert len(report["ended"]) == (1 if launcher is None else 2)
    assert all("4 times in a row" in sentence for sentence in report["ended"])

    names = sorted(path.name for path in (tmp_path / "dumps").iterdir())
    assert names[:3] == [f"update-000002-try-{number}" for number in (1, 2, 3)]
    attempts = [read_dump(tmp_path / "dumps" / name, CorrectionConfig())[0] for name in names[:3]]
    assert "policy/loss" in attempts[0].reason
    assert attempts[1].reason == "the gradient norm is not finite"
    assert "times the median" in attempts[2].reason
