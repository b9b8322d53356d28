"""Modules that a run of one turn loads: what a reader of training meets."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.paths import ROOT
from tests.fixtures.remote import save_model

MOST_MODULES, MOST_LINES = 255, 33_500
"""Bounds that only fall: measured in November 2026, 253 modules of 33,474 lines."""
GUESTS = (
    "lockstep.lab",
    "lockstep.demo",
    "lockstep.integrations",
    "lockstep.rollout.environments.demo.",
)


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_a_run_of_one_turn_loads_no_guest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"question": f"compute {i}+1", "answer": str(i + 1)} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text("def many_tokens(rollout): return float(rollout.num_sampled % 7)\n")
    settings = {
        "model.path": save_model(tmp_path / "model"),
        "environment": "single_turn",
        "data.path": tmp_path / "rows.jsonl",
        "data.heldout_path": "null",
        "reward.functions": f"[{tmp_path}/reward.py:many_tokens]",
        "rollout.max_model_len": 320,
        "rollout.prompts_per_step": 2,
        "rollout.samples_per_prompt": 4,
        "rollout.max_tokens_per_turn": 16,
        "updates": 1,
        "run_root": tmp_path / "runs",
    }
    worker = ROOT / "tests/integration/workers/loaded_modules.py"
    done = subprocess.run(
        [
            sys.executable,
            str(worker),
            str(tmp_path / "modules"),
            *(f"{key}={value}" for key, value in settings.items()),
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    loaded = (tmp_path / "modules").read_text().split()
    assert [name for name in loaded if f"{name}.".startswith(GUESTS) or name.startswith(GUESTS)] == [
        "lockstep.integrations",
        "lockstep.integrations.environments",
        "lockstep.rollout.environments.demo",
    ], "the empty modules of folders in which environments are looked for"
    origins = [spec.origin for name in loaded if (spec := importlib.util.find_spec(name)) and spec.origin]
    lengths = [len(Path(origin).read_text(encoding="utf-8").splitlines()) for origin in origins]
    lengths = [length for length in lengths if length > 1]  # others are the docstrings of folders
    with capsys.disabled():
        print(f"\na run of one turn loads {len(lengths)} modules, {sum(lengths)} lines")
    assert len(lengths) <= MOST_MODULES
    assert sum(lengths) <= MOST_LINES
