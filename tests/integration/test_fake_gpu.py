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


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    if (reason := fake_gpu.missing()) is not None:
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("fake_gpu")
    command = [sys.executable, "-m", "tests.integration.workers.fake_gpu", str(directory)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800, check=False)
    path = directory / "found.json"
    assert path.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", CHECKS)
def test_on_a_fake_gpu(found: dict[str, str | None], name: str) -> None:
    assert found[name] is None, found[name]


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fake_gpu, "ROOT", tmp_path)  # nothing is compiled there
    monkeypatch.setattr(fake_gpu, "COMPILER", "no-such-compiler")
    assert "found no no-such-compiler" in str(fake_gpu.missing())
