"""`.ci/run` on a made-up machine, a PATH of stand-ins that write down how they were called; and other workflows."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.fixtures.paths import ROOT

APT = ["apt-get update", "apt-get install -y --no-install-recommends chromium"]
MAKE = ["make environments", "make lint", "make test", "make test-long", "make test-v2"]


def run(directory: Path, *, user: int = 0, without: str = "", failing: str = "") -> tuple[int, list[str]]:
    """Exit code and sorted calls of a run. failing: a call that exits with 3."""
    calls = directory / "calls"
    for name in ("make", "apt-get", "chromium"):
        if name not in without.split():
            (directory / name).write_text(
                f'#!/bin/sh\necho "{name} $*" >> {calls}\n[ "{name} $*" != "{failing}" ] || exit 3\n'
            )
            (directory / name).chmod(0o755)
    (directory / "id").write_text(f"#!/bin/sh\necho {user}\n")
    (directory / "id").chmod(0o755)
    for name in ("bash", "dirname"):
        (directory / name).symlink_to(str(shutil.which(name)))
    done = subprocess.run([ROOT / ".ci" / "run"], env={"PATH": str(directory)}, capture_output=True, timeout=60)
    return done.returncode, sorted(calls.read_text().splitlines())


@pytest.mark.parametrize("apt_failure", ["", *APT])
def test_a_missing_chromium_is_installed_and_a_failure_of_that_changes_nothing(
    tmp_path: Path, apt_failure: str
) -> None:
    code, calls = run(tmp_path, without="chromium", failing=apt_failure)
    assert code == 0
    assert calls == sorted([*(APT[:1] if apt_failure == APT[0] else APT), *MAKE])


@pytest.mark.parametrize(
    "machine", [{}, {"user": 1000, "without": "chromium"}, {"without": "chromium apt-get"}], ids=str
)
def test_nothing_is_installed_where_it_is_there_or_may_not_be(tmp_path: Path, machine: dict) -> None:
    assert run(tmp_path, **machine) == (0, MAKE)


@pytest.mark.parametrize(
    ("failing", "calls"),
    [
        ("make lint", MAKE[:2]),
        ("make test-v2", [*MAKE[:2], "make test-v2"]),
        ("make test", [*MAKE[:3], MAKE[4]]),
        ("make test-long", MAKE),
    ],
)
def test_a_failing_check_fails_the_run(tmp_path: Path, failing: str, calls: list[str]) -> None:
    code, found = run(tmp_path, failing=failing)
    assert code != 0
    assert found == calls


def test_workflows_call_targets_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    workflows = sorted((ROOT / ".github" / "workflows").iterdir())
    called = [target for path in workflows for target in re.findall(r"make ([\w-]+)", path.read_text(encoding="utf-8"))]
    assert "test-cuda-wheel" in called
    assert [target for target in called if f"\n{target}: " not in makefile] == []
