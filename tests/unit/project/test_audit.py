"""`make audit` with stand-ins for pip-audit: what it found, and what it could not look up, decide the exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.project.audit_packages import FOLDER, LOCKS, main

SAFE = {"name": "aiohttp", "version": "3.14.5", "vulns": []}
BAD = {"name": "jinja2", "version": "3.1.6", "vulns": [{"id": "CVE-1", "fix_versions": ["3.1.7"]}]}
UNKNOWN = {"name": "vllm", "skip_reason": "Dependency not found on PyPI"}


@pytest.mark.parametrize(
    ("answer", "status", "said"),
    [
        ([SAFE], 0, "no known vulnerability in 1 packages"),
        ([SAFE, BAD, UNKNOWN], 1, "jinja2 3.1.6: CVE-1, mended in 3.1.7"),
        ([SAFE, UNKNOWN], 2, "1 of 2 packages could not be looked up: vllm"),
        ([], 2, ""),
        (None, 2, "the database did not answer"),
    ],
)
def test_the_exit_status_says_what_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], answer: list | None, status: int, said: str
) -> None:
    output = "" if answer is None else json.dumps({"dependencies": answer, "fixes": []})
    program = tmp_path / "pip-audit"
    program.write_text(f"#!/bin/sh\necho \"$*\" >> {tmp_path}/call\ncat <<'E'\n{output}\nE\n")
    program.chmod(0o755)
    assert main(str(program), ["--vulnerability-service", "osv"]) == status
    assert said in capsys.readouterr().out
    calls = (tmp_path / "call").read_text().splitlines()
    for call, names in zip(calls, LOCKS, strict=False):  # none after one that failed
        assert "--vulnerability-service osv" in call
        assert all(f"--requirement {FOLDER / name}" in call and (FOLDER / name).is_file() for name in names)
    assert len(calls) == (1 if answer is None else len(LOCKS))


def test_every_lock_of_packages_is_looked_up() -> None:
    locks = {path.name for path in FOLDER.glob("*.txt")} - {"torch-cpu.txt", "build.txt"}
    assert {name for names in LOCKS for name in names} == locks
