"""A pytest plugin that skips the tests for which no time is left.

    pytest -p scripts.project.deadline --deadline <a value of time.monotonic()>

A test that has begun ends. The processes of pytest-xdist share the deadline.
"""

from __future__ import annotations

import time

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--deadline", type=float, default=float("inf"), help="the time.monotonic() that no test begins after"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    deadline: float = item.config.option.deadline
    if time.monotonic() > deadline:
        pytest.skip("left out: no time was left; for more: make check CHECK_SECONDS=600")
