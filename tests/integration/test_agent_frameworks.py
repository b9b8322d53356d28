"""Training of agents written in LangGraph, OpenAI's Agents SDK, pydantic-ai and smolagents, each in its own way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lockstep.demo.make import make_demo
from lockstep.rollout.saved_rollouts import read_rollouts
from tests.fixtures.forked_python import forked_python
from tests.fixtures.interpreters import python_with
from tests.fixtures.paths import ROOT

pytestmark = pytest.mark.engine

FRAMEWORKS = ("langgraph", "agents_sdk", "pydantic_ai", "smolagents")


@pytest.fixture(scope="module")
def python() -> str:
    """An interpreter with the packages of the four frameworks and those of Lockstep."""
    make_demo("calculator", ROOT / "models/calculator", ROOT / "data/demo/calculator", 0, Console(file=sys.stderr))
    return python_with("the agents' packages", "smolagents")


def metrics_of(python: str, runs: Path, *words: str, folders: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Run `scripts/train.py` and return the metrics of its updates. folders: of more packages."""
    variables = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *folders]),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    without_evaluation = ("data.heldout_path=null", "eval.every=0", "eval.before_training=false")
    words = (*words, *without_evaluation, f"run_root={runs}", "run_name=run")
    done = subprocess.run(
        [python, "scripts/train.py", "experiment=demo", "environment=agent", *words],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = map(json.loads, (runs / "run/metrics.jsonl").read_text().splitlines())
    found = [line for line in lines if "rollout/token_match_rate" in line]
    assert all(line["rollout/token_match_rate"] == 1.0 for line in found)
    assert all(line["rollout/dropped_fraction"] == 0.0 for line in found)
    return found


@pytest.mark.timeout(600)
def test_agents_of_four_frameworks_lose_no_rollout(tmp_path: Path, python: str) -> None:
    rows = [
        {"question": f"compute {11 + update}*{7 + update}", "answer": "", "agent": name}
        for update in range(2)
        for name in FRAMEWORKS
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text("def many(rollout): return float(rollout.num_sampled % 7)\n")
    where = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = subprocess.run(where, check=True, capture_output=True, text=True).stdout.strip()
    metrics_of(
        forked_python(),
        tmp_path / "runs",
        f"environment.settings.agent={ROOT}/tests/fixtures/framework_agents.py:play",
        f"data.path={tmp_path}/rows.jsonl",
        "data.shuffle=false",
        f"reward.functions=[{tmp_path}/reward.py:many]",
        "updates=2",
        "rollout.prompts_per_step=4",
        "rollout.samples_per_prompt=3",
        folders=[packages],
    )
    files = sorted((tmp_path / "runs/run/rollouts").glob("step-*.jsonl"))
    assert len(files) == 2
    for path in files:
        rollouts = list(read_rollouts(path))
        # Clients that a framework keeps between episodes lose rollouts from the second update on.
        assert Counter(rollout.example["agent"] for rollout in rollouts) == dict.fromkeys(FRAMEWORKS, 3)
        for rollout in rollouts:
            assert rollout.is_trainable, (rollout.example["agent"], rollout.error)
            assert rollout.calls


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("agent", "words"),
    [
        ("langgraph_agent", ["environment.max_turns=3"]),
        ("agents_sdk", ["environment.max_turns=3"]),
        ("pydantic_ai_agent", ["environment.max_turns=3"]),
        ("smolagents_agent", ["environment.max_turns=2", "reward.functions=[environment_reward]"]),
    ],
)
def test_an_agent_of_each_framework_learns(tmp_path: Path, python: str, agent: str, words: list[str]) -> None:
    found = metrics_of(
        python,
        tmp_path / "runs",
        f"environment.settings.agent=benchmarks/environments/{agent}.py:play",
        "updates=20",
        "rollout.prompts_per_step=8",
        *words,
    )
    rewards = [line["reward/mean"] for line in found]
    assert len(rewards) == 20
    assert sum(rewards[-5:]) / 5 > rewards[0] + 0.2
    if agent != "smolagents_agent":  # which sends calls back as texts
        assert all(line["rollout/branch_rate"] == 0.0 for line in found)
