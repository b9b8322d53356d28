"""scripts/compare_objectives.py on a run of the demo: its own gradient is found again, and refusals are sentences."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from lockstep.trainer.observe.metrics_log import read_metrics
from tests.fixtures.forked_python import forked_python
from tests.integration.test_run import ROOT, demo, train  # noqa: F401  # `demo` is a fixture

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def run(demo: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    root = tmp_path_factory.mktemp("runs")
    train(
        *demo, "updates=3", f"run_root={root}", "run_name=whole", "rollout.prompts_per_step=4",
        "rollout.samples_per_prompt=4", "checkpoint.every=2", "checkpoint.keep=99", "logger.print_rollouts=0",
    )  # fmt: skip
    return root / "whole"


def compare(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [forked_python(), "scripts/compare_objectives.py", *map(str, arguments)], cwd=ROOT, capture_output=True,
        text=True, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return sum(float((a[name] - b[name]).double().square().sum()) for name in a) ** 0.5


def test_the_gradient_of_the_run_and_its_moments_are_found_again(run: Path, tmp_path: Path) -> None:
    page, models = tmp_path / "page.html", tmp_path / "models"
    done = compare(
        *(run, "--step", 3, "--with", "grpo,gspo", "--corrections", "off,sequence_mask", "--json"),
        *("--html", page, "--models", models),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    logged = next(line["optim/grad_norm"] for line in read_metrics(run / "metrics.jsonl") if line["step"] == 3)
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == ["run", "grpo off", "grpo sequence_mask", "gspo off", "gspo sequence_mask"]
    assert rows["run"]["norm"] == pytest.approx(logged, rel=1e-5)
    assert rows["run"]["step"] > 0
    assert "moments of the checkpoint" in found["about"]["optimizer"]
    assert "gspo sequence_mask" in page.read_text()
    assert sorted(path.name for path in models.iterdir()) == [
        "0-run", "1-grpo-off", "2-grpo-sequence_mask", "3-gspo-off", "4-gspo-sequence_mask",
    ]  # fmt: skip
    before = {
        name.removeprefix("model."): tensor
        for name, tensor in load_file(run / "checkpoints/step-2/parameters.safetensors").items()
    }
    after = load_file(run / "model/model.safetensors")
    share = {
        name: distance(after, load_file(models / name / "model.safetensors")) / distance(after, before)
        for name in ("0-run", "4-gspo-sequence_mask")
    }
    assert share["0-run"] < 1e-3 < share["4-gspo-sequence_mask"], share
    AutoTokenizer.from_pretrained(models / "0-run")


def test_what_cannot_be_compared_is_said(run: Path) -> None:
    for arguments, expected in (
        ((run, "--step", 2, "--with", "gspo"), "no whole checkpoint; name --step 1 or 3, or train with"),
        ((run, "--step", 3, "--with", "ppo"), "ppo needs a critic"),
        ((run / "nothing", "--step", 1), "config.yaml"),
    ):  # fmt: skip
        done = compare(*arguments)
        assert done.returncode == 2
        assert expected in done.stderr, done.stderr
        assert "Traceback" not in done.stderr
