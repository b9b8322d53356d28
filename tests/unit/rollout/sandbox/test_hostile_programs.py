"""Hostile programs (`tests/hostile/programs/`), as root and as a user, with and without namespaces."""

from __future__ import annotations

import functools
import json
import subprocess
from typing import Any

import pytest

from tests.hostile.cases import cases
from tests.hostile.identities import identities, run_as

pytestmark = pytest.mark.long

PROGRAMS = cases("programs")
WITHOUT_WALLS = [name for name, case in PROGRAMS.items() if case.expected.get("walls") == "none"]
FOR_ONE_PROGRAM = ("environment",)
"""Programs whose whole output differs in a session, which sets more variables."""
MOST_S = 10.0
"""Seconds that no program may hold its reward worker: two of its own, the rest for a loaded machine."""


@functools.cache
def finished(identity: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run all programs as an identity, once."""
    if identity not in identities():
        pytest.skip(f"this system has no identity {identity}")
    names = WITHOUT_WALLS if "--unsafe" in flags else PROGRAMS
    return run_as(identity, "-m", "tests.hostile.run_programs", *flags, *names)


def results(identity: str, *flags: str) -> dict[str, Any]:
    done = finished(identity, *flags)
    assert done.returncode == 0, f"the runner itself ended: {done.returncode} {done.stderr[-2000:]}"
    return json.loads(done.stdout)


def check(found: dict[str, Any], name: str) -> None:
    expected = PROGRAMS[name].expected
    said = f"{name}: {found}"
    assert found["survivors"] == [], said
    assert found["ended"] in expected.get("ended", "exited").split(), said
    assert found["took_s"] < MOST_S, said
    if expected.get("ended", "exited") == "exited" or "status" in expected:
        assert found["status"] == int(expected.get("status", "0")), said
    assert "broke" not in found["stdout"], said
    assert "hunter2" not in found["stdout"] + found["stderr"], said
    if "prints" in expected:
        assert found["stdout"].rstrip("\n") == expected["prints"], said


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("identity", ["root", "user", "container"])
def test_a_hostile_program_stays_in_its_sandbox(identity, name):
    check(results(identity)[name], name)


@pytest.mark.parametrize("identity", ["root", "user"])
def test_hostile_programs_one_after_another_stay_in_one_sandbox_and_harm_no_later_program(identity):
    found = results(identity, "--session")
    assert found.pop("survivors") == []
    assert list(found) == list(PROGRAMS)
    for name, result in found.items():
        if name not in FOR_ONE_PROGRAM:
            check(result, name)
        assert result["after"] == "a\nb\nc\nalone\n", f"{name}: {result}"


@pytest.mark.parametrize("name", WITHOUT_WALLS)
def test_without_namespaces_the_limits_hold(name):
    check(results("without", "--unsafe")[name], name)


REFUSED = """
import lockstep.rollout.sandbox.sandbox as sandbox
print(sandbox.isolation_problem())
try:
    print("ran", sandbox.run_python("print(6 * 7)"))
except sandbox.SandboxError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("identity", "reason"), [("without", "unshare: No space left"), ("container_of_root", "does not limit the number")]
)
def test_where_a_program_cannot_be_isolated_it_does_not_run(identity, reason):
    if identity not in identities():
        pytest.skip(f"this system has no identity {identity}")
    done = run_as(identity, "-c", REFUSED)
    first, second = done.stdout.splitlines()
    assert first == second
    assert reason in first
    assert "so it did not run" in first
    assert "reward.settings.code_tests.unsafe=true" in first
