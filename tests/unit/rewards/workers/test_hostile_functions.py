"""Hostile reward functions (`tests/hostile/functions/`) in worker processes, as root and as a user."""

from __future__ import annotations

import functools
import json
import subprocess
from typing import Any

import pytest

from tests.hostile.cases import cases
from tests.hostile.identities import identities, run_as

pytestmark = pytest.mark.long

FUNCTIONS = cases("functions")
MOST_S = 20.0


@functools.cache
def finished(identity: str) -> subprocess.CompletedProcess[str]:
    """Run all functions as an identity, once."""
    if identity not in identities():
        pytest.skip(f"this system has no identity {identity}")
    return run_as(identity, "-m", "tests.hostile.run_functions", *FUNCTIONS, timeout_s=250.0)


def results(identity: str) -> dict[str, Any]:
    done = finished(identity)
    assert done.returncode == 0, f"the runner itself ended: {done.returncode} {done.stderr[-2000:]}"
    return json.loads(done.stdout)


# Workers do not depend on the user, so the second round, of a minute, is for `make test-slow`.
everyone = pytest.mark.parametrize("identity", ["root", pytest.param("user", marks=pytest.mark.slow)])


@pytest.mark.parametrize("name", FUNCTIONS)
@everyone
def test_a_hostile_function_gets_its_outcome_and_harms_no_other(identity, name):
    found = results(identity)[name]
    expected = FUNCTIONS[name].expected
    said = f"{name}: {found}"
    assert found["verdict"]["outcome"] in expected["outcome"].split(), said
    assert expected.get("says", "") in found["verdict"]["detail"], said
    assert [(after["outcome"], after["value"]) for after in found["after"]] == [("value", 0.5)] * 2, said
    assert found["took_s"] < MOST_S, said


@everyone
def test_hostile_functions_leave_no_process(identity):
    assert results(identity)["survivors"] == []
