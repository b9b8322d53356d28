"""An engine with its weight sync, and a run with a gateway, listen on loopback only.

Runs of two ranks that sample from a server: test_engine_server.py.
"""

import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.fixtures.sockets import is_loopback, listening, watched
from tests.integration.conftest import Served
from tests.integration.test_run import ROOT, command, demo  # noqa: F401  # `demo` is a fixture

pytestmark = pytest.mark.engine


def test_engine_and_weight_sync_listen_on_loopback_only(served: Served):
    served.push()
    served.generate((5, 6, 7), max_tokens=2)
    deadline = time.monotonic() + 30  # a rank of an earlier test may still be ending
    while (reachable := [entry for entry in listening() if not is_loopback(entry[0])]) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert reachable == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_with_a_gateway_listens_on_loopback_only(demo: tuple[str, ...], tmp_path: Path):  # noqa: F811
    overrides = (
        *demo, "environment=agent", "environment.settings.agent=tests/fixtures/agents.py:calculator_agent", "updates=2",
        "rollout.prompts_per_step=2", "rollout.samples_per_prompt=4", f"run_root={tmp_path}", "run_name=agents",
        "logger.print_rollouts=0",
    )  # fmt: skip
    with (tmp_path / "output").open("w") as output:
        run = subprocess.Popen(
            command(*overrides), cwd=ROOT, stdout=output, stderr=output, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    try:
        with watched(run.pid) as seen:
            status = run.wait(timeout=500)
    finally:
        run.kill()  # its engine ends with it
    assert status == 0, (tmp_path / "output").read_text()[-6000:]
    assert len({port for _, port in seen.listening}) >= 2, "the gateway, and weight sync"
    assert seen.reachable == []
