"""`make gpu-check` in its rehearsed form: every check with a CPU form passes, the others say what they need.

Each change rehearses the quick form: an engine, its evidence, a transfer of weights and a run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from lockstep.scripts.gpu_check import has_vnni
from lockstep.scripts.gpu_checks import CHECKS, Check
from tests.fixtures.forked_python import forked_python
from tests.fixtures.paths import ROOT

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", params=["--quick", pytest.param("", id="whole", marks=pytest.mark.slow)])
def rehearsal(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[subprocess.CompletedProcess[str], Path]:
    out = tmp_path_factory.mktemp("checked") / "run"
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "gpu-check", "--rehearse", *filter(None, [request.param]), "--out", out],
        cwd=ROOT, capture_output=True, text=True, timeout=880, env={**os.environ, "PYTHON_EXEC": forked_python()},
    )  # fmt: skip
    return done, out


@pytest.fixture
def results(rehearsal: tuple[subprocess.CompletedProcess[str], Path]) -> dict[str, dict[str, Any]]:
    done, out = rehearsal
    assert (out / "gpu_check.json").exists(), done.stderr[-4000:]
    return {one["check"]["name"]: one for one in json.loads((out / "gpu_check.json").read_text())["results"]}


@pytest.fixture
def checks(request: pytest.FixtureRequest) -> list[Check]:
    is_quick = request.node.callspec.params["rehearsal"] == "--quick"
    return [check for check in CHECKS if check.is_quick or not is_quick]


def runs(check: Check) -> bool:
    return check.rehearses and (has_vnni() or not check.needs_vnni)


def test_each_check_passes_its_rehearsal_or_says_what_it_needs(
    checks: list[Check], results: dict[str, dict[str, Any]]
) -> None:
    assert list(results) == [check.name for check in checks]
    assert {name: one for name, one in results.items() if one["verdict"] not in ("passed", "skipped")} == {}
    for check in checks:
        found = results[check.name]
        if runs(check):
            assert found["verdict"] == "passed"
            assert found["measured"]
        else:
            needed = "needs a GPU, or a CPU with VNNI" if check.needs_vnni else "needs a GPU"
            assert (found["verdict"], found["reason"], found["measured"]) == ("skipped", needed, [])


def test_the_rehearsal_reports_and_exits_with_success(
    rehearsal: tuple[subprocess.CompletedProcess[str], Path], checks: list[Check], results: dict[str, dict[str, Any]]
) -> None:
    done, out = rehearsal
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run = {check.name for check in checks if runs(check)}
    assert f"{len(run)} passed, 0 failed, {len(checks) - len(run)} skipped" in done.stdout
    to_paste = done.stdout.partition("To paste into an issue:")[2]
    page = (out / "index.html").read_text()
    for name in results:
        assert f"\n| {name} | " in to_paste
        assert f"<h2>{name} " in page
        assert (out / name / "log.txt").exists() == (name in run)
    with zipfile.ZipFile(out.with_suffix(".zip")) as archive:
        names = archive.namelist()
    expected = {"gpu_check.json", "report.md", "evidence/engine_settings.txt", *(f"{name}/log.txt" for name in run)}
    assert expected <= set(names)
    assert any(name.startswith("first_update/runs/") and name.endswith("rank-0.txt") for name in names)
