"""Lockstep with the CUDA builds of vLLM and torch, on a machine without a GPU.

`LOCKSTEP_CUDA_PYTHON` names the Python of an environment that has them (docs/gpu.md). Its checks are functions in
workers/cuda_wheel.py, which also says what they cannot show.
"""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from tests.fixtures.paths import ROOT
from tests.integration.workers.cuda_wheel import CHECKS

PYTHON = os.environ.get("LOCKSTEP_CUDA_PYTHON")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.cuda_wheel,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not PYTHON,
        reason="needs the CUDA builds of vLLM and torch: set LOCKSTEP_CUDA_PYTHON to the Python that has them",
    ),
]


def run(*arguments: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [str(PYTHON), *map(str, arguments)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    directory = tmp_path_factory.mktemp("cuda_wheel")
    done = run("-m", "tests.integration.workers.cuda_wheel", directory)
    path = directory / "found.json"
    assert path.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", CHECKS)
def test_the_cuda_builds(found: dict[str, str | None], name: str) -> None:
    assert found[name] is None, found[name]


@pytest.mark.timeout(5400)
def test_unit_tests_and_gradients_of_ranks_pass_with_the_cuda_builds() -> None:
    left_out = (
        # Repairs of a CPU's kernels are not installed there.
        "--ignore-glob=tests/unit/rollout/engine/repairs/test_cpu_*",
        # vLLM's parser asks for the device; the checks above pretend one.
        "--deselect=tests/unit/trainer/engines/test_engine_settings.py"
        "::test_vllm_parses_the_command_of_a_server_on_a_gpu",
    )
    pytest_words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu")
    for words in (("-n", "3", "--dist", "loadfile", "tests/unit"), ("tests/integration/test_gradients.py",)):
        done = run(*pytest_words, *left_out, *words)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
