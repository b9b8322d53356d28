"""A run whose model computes in a sandbox: the demo's calculator, as a program of each call's expression."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from lockstep.rollout.sandbox.sandbox import isolation_problem
from tests.fixtures.processes import descendants
from tests.integration.test_run import ROOT, command, demo, metrics, train
from tests.unit.rollout.sandbox.test_sandbox import read, wait_until

__all__ = ["demo"]  # the fixture: the demo's model and data

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.skipif(isolation_problem() is not None, reason="this system allows no namespaces"),
]

SMALL = ("rollout.prompts_per_step=4", "rollout.samples_per_prompt=4", "logger.print_rollouts_every=0")
CALCULATOR = '''
from lockstep.integrations.environments.sandbox import SandboxEnvironment
from lockstep.rollout.environments.toolbox import Toolbox


class Calculator(SandboxEnvironment):
    """The demo's only tool, computed by a program."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self._toolbox = Toolbox([self.calculator], timeout_s=60.0)

    async def calculator(self, expression: str) -> str:
        """Evaluate an integer expression with + - * and parentheses.

        Args:
            expression: for example 64*22-55
        """
        text = await self.python(f"open('asked', 'a').write('x')\\nprint({expression})")
        return text.partition("\\n")[2]


class Slow(Calculator):
    async def calculator(self, expression: str) -> str:
        """Evaluate an integer expression with + - * and parentheses.

        Args:
            expression: for example 64*22-55
        """
        return await self.shell("sleep 50")
'''


def settings(directory: Path, name: str) -> tuple[str, ...]:
    (directory / "mine.py").write_text(CALCULATOR)
    return (f"environment.name={directory}/mine.py:{name}", "environment.max_turns=3", f"run_root={directory}")


def sandboxes(pid: int) -> list[int]:
    """Return the launchers among the descendants of a process."""
    return [one for one in descendants(pid) if "sandbox/jail.py" in read(Path(f"/proc/{one}/cmdline"))]


@pytest.mark.slow
def test_a_run_trains_the_sampled_tokens_of_episodes_with_programs(demo: tuple[str, ...], tmp_path: Path) -> None:
    train(*demo, *SMALL, *settings(tmp_path, "Calculator"), "updates=3", "run_name=first")
    lines = [line for line in metrics(tmp_path / "first") if "reward/mean" in line]
    assert len(lines) == 3
    for line in lines:
        assert line["rollout/token_match_rate"] == 1.0
        assert line["environment/tool_calls"] > 0
        assert line.get("rollout/failed", 0) == 0
    assert max(line["reward/mean"] for line in lines) > 0
    answers = [json.loads(text) for text in (tmp_path / "first/rollouts/step-000001.jsonl").read_text().splitlines()]
    assert answers


@pytest.mark.slow
def test_a_run_that_is_killed_leaves_no_sandbox(demo: tuple[str, ...], tmp_path: Path) -> None:
    words = (*demo, *SMALL, *settings(tmp_path, "Slow"), "environment.settings.timeout_s=60", "updates=3")
    run = subprocess.Popen(
        command(*words, "run_name=killed"), cwd=ROOT, stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 300
        while not (found := sandboxes(run.pid)):
            assert run.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.5)
    finally:
        run.send_signal(signal.SIGKILL)
        run.wait()
    wait_until(lambda: not any(read(Path(f"/proc/{pid}/cmdline")).count("jail.py") for pid in found))
    assert not list(tmp_path.glob("lockstep-sandbox-*"))
