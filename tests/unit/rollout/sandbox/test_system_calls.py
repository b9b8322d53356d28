"""The list of refused system calls."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lockstep.rollout.errors import SandboxError
from lockstep.rollout.sandbox.system_calls import PRLIMIT, REFUSED, SOCKET_CALLS, refusing_filter

HEADERS = (Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), Path("/usr/include/asm-generic/unistd.h"))


@pytest.mark.parametrize("column", [0, 1], ids=["x86_64", "aarch64"])
def test_numbers_are_those_of_the_kernel_headers(column):
    if not HEADERS[column].exists():
        pytest.skip(f"this system has no {HEADERS[column]}")
    known = dict(re.findall(r"#define __NR_(\w+)\s+(\d+)", HEADERS[column].read_text()))
    calls = {**REFUSED, "prlimit64": PRLIMIT, "socket": SOCKET_CALLS[0], "socketpair": SOCKET_CALLS[1]}
    calls.pop("memfd_secret" if column and "memfd_secret" not in known else "", None)
    assert {name: str(numbers[column]) for name, numbers in calls.items()} == {name: known[name] for name in calls}


def test_an_unknown_kind_of_machine_has_no_filter():
    with pytest.raises(SandboxError, match="x86_64 and aarch64, found riscv64"):
        refusing_filter("riscv64")
    assert len(refusing_filter("x86_64")) == len(refusing_filter("aarch64"))
