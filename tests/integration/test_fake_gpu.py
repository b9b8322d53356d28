"""The trainer on a GPU that computes on the CPU: no mixed devices, the intended kernels and dtypes, few host syncs.

Its checks are functions in workers/fake_gpu.py, which run in one process: a stub replaces parts of torch before it is
imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures import fake_gpu
from tests.fixtures.paths import ROOT
from tests.integration.workers.fake_gpu import CHECKS

pytestmark = pytest.mark.timeout(900)

WEEKLY = (
    "qwen2 with bfloat16 weights",  # as qwen3
    "gemma3 with bfloat16 weights",  # as gemma2
    # Each width and each window stays in another pair.
    *("heads of 64, window 9", "heads of 64, window 45", "heads of 128, window None", "heads of 128, window 45"),
    *("heads of 256, window None", "heads of 256, window 9"),
)
assert set(WEEKLY) <= set(CHECKS)


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """Errors of the checks that this session has chosen."""
    if (reason := fake_gpu.missing()) is not None:
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("fake_gpu")
    command = [sys.executable, "-m", "tests.integration.workers.fake_gpu", str(directory)]
    tests = [item for item in request.session.items if isinstance(item, pytest.Function)]
    command += [str(item.callspec.params["name"]) for item in tests if item.function is test_on_a_fake_gpu]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800, check=False)
    path = directory / "found.json"
    assert path.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in WEEKLY else []) for name in CHECKS]
)
def test_on_a_fake_gpu(found: dict[str, str | None], name: str) -> None:
    assert found[name] is None, found[name]


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fake_gpu, "ROOT", tmp_path)  # nothing is compiled there
    monkeypatch.setattr(fake_gpu, "COMPILER", "no-such-compiler")
    assert "found no no-such-compiler" in str(fake_gpu.missing())
