"""`make gpu-check` in its rehearsed form: every check with a CPU form passes, the others say what they need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from scripts.gpu_check import has_vnni
from scripts.gpu_checks import CHECKS
from tests.fixtures.forked_python import forked_python
from tests.fixtures.paths import ROOT

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    out = tmp_path_factory.mktemp("checked") / "run"
    done = subprocess.run(
        [sys.executable, "-m", "scripts.gpu_check", "--rehearse", "--out", str(out)],
        cwd=ROOT, capture_output=True, text=True, timeout=880, env={**os.environ, "PYTHON_EXEC": forked_python()},
    )  # fmt: skip
    return done, out


@pytest.fixture(scope="module")
def results(rehearsal: tuple[subprocess.CompletedProcess[str], Path]) -> dict[str, dict[str, Any]]:
    done, out = rehearsal
    assert (out / "gpu_check.json").exists(), done.stderr[-4000:]
    return {one["check"]["name"]: one for one in json.loads((out / "gpu_check.json").read_text())["results"]}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_a_check_passes_its_rehearsal_or_says_what_it_needs(check: Any, results: dict[str, dict[str, Any]]) -> None:
    found = results[check.name]
    if check.needs_vnni and not has_vnni():
        assert (found["verdict"], found["reason"]) == ("skipped", "needs a GPU, or a CPU with VNNI")
    elif check.rehearses:
        assert found["verdict"] == "passed", found
        assert found["measured"]
    else:
        assert (found["verdict"], found["reason"], found["measured"]) == ("skipped", "needs a GPU", [])


def test_the_rehearsal_reports_and_exits_with_success(
    rehearsal: tuple[subprocess.CompletedProcess[str], Path], results: dict[str, dict[str, Any]]
) -> None:
    done, out = rehearsal
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    passed = sum(check.rehearses and (has_vnni() or not check.needs_vnni) for check in CHECKS)
    assert f"{passed} passed, 0 failed, {len(CHECKS) - passed} skipped" in done.stdout
    to_paste = done.stdout.partition("To paste into an issue:")[2]
    page = (out / "index.html").read_text()
    for name in results:
        assert f"\n| {name} | " in to_paste
        assert f"<h2>{name} " in page
        assert (out / name / "log.txt").exists() == (results[name]["verdict"] != "skipped")
    with zipfile.ZipFile(out.with_suffix(".zip")) as archive:
        names = archive.namelist()
    assert {"gpu_check.json", "report.md", "evidence/engine_settings.txt", "loop/log.txt"} <= set(names)
    assert any(name.startswith("first_update/runs/") and name.endswith("rank-0.txt") for name in names)
