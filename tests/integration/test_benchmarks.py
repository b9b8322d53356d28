"""Benchmarks that need engines, processes or minutes, in their smallest form and started from the command line.

The others are in tests/unit/project/test_benchmarks.py.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

NUMBERS = {
    "asynchrony": ("ratio_wait", "ratio_drop"),
    "compare_trl": ("multi_turn_ratio", "single_turn_ratio"),
    "front_end": ("ratio_8", "ratio_16"),
    "growth": ("time_by_length", "memory_by_length", "time_by_ranks"),
    "head": ("total_ratio", "peak_ratio"),
    "layer": ("qwen3_ratio", "llama_ratio"),
    "limit": ("multi_equal_1_ratio",),
    "loop": ("float32_k3_kl", "bfloat16_k3_kl", "float32_update_share", "float32_gb_per_s"),
    "records": ("us_per_token",),
    "scale": ("rate_of_2_drivers", "episodes_by_ranks", "meeting_by_ranks", "http_ms_per_request"),
    "rollouts": ("engine_ratio", "rollout_ratio", "idle_fraction"),
    "startup": ("seconds_to_first_update",),
    "transport": ("compact_share", "json_share"),
}
"""Numbers of each benchmark that are compared with a goal."""


@pytest.mark.parametrize("name", NUMBERS)
def test_a_benchmark_measures_in_its_smallest_form(name: str) -> None:
    if name == "compare_trl":
        pytest.importorskip("trl")
    done = subprocess.run(
        [sys.executable, f"benchmarks/{name}.py", "--quick", "--json"],
        cwd=ROOT, capture_output=True, text=True, timeout=850, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["benchmark"] == name
    assert result["rows"]
    for number in NUMBERS[name]:
        assert math.isfinite(result[number]), number


GPU_COMMANDS = re.findall(
    r"`python (benchmarks/.+?)`", (ROOT / "docs/performance.md").read_text().split("## On a GPU")[1].split("\n## ")[0]
)


@pytest.mark.parametrize("command", GPU_COMMANDS)
def test_a_command_for_gpus_runs_in_its_smallest_form_on_a_cpu(command: str) -> None:
    if "update.py" in command:
        pytest.importorskip("trl")
    done = subprocess.run(
        [sys.executable, *shlex.split(command), "--quick", "--json"],
        cwd=ROOT, capture_output=True, text=True, timeout=850, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert json.loads(done.stdout.splitlines()[-1])["rows"]
