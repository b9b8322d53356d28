"""Modules that a reward file imports are the user's, whatever Lockstep and installed packages call theirs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
REWARD = """
import evaluate, report, rewards.parts, rollout, trainer

def mine(rollout):
    import plot
    return evaluate.VALUE + report.VALUE + rewards.parts.VALUE + plot.VALUE
"""
SCORE = """
import asyncio, sys
from lockstep.rewards.composition import make_reward_set
from lockstep.rewards.workers.pool import Isolation
from lockstep.rollout.records import EngineCall, FinishReason, Rollout

call = EngineCall(prompt_ids=(1,), sampled_ids=(2,), sampled_logprobs=(-0.5,), finish_reason=FinishReason.STOP)
messages = ({"role": "user", "content": "q"}, {"role": "assistant", "content": "a"})
rollout = Rollout(rollout_id=0, group_id=0, calls=(call,), messages=messages)
rewards = make_reward_set(["mine/reward.py:mine"], isolation=Isolation(mode=sys.argv[1], workers=1))
(scored,) = asyncio.run(rewards.score([rollout]))
rewards.close()
print(scored.reward, scored.error)
"""


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_modules_beside_the_file_and_in_the_working_directory_are_found_first(tmp_path: Path, mode):
    """Python puts the directory of a script first, as PYTHONPATH does here."""
    (tmp_path / "mine" / "rewards").mkdir(parents=True)
    for name in (
        "mine/reward",
        "mine/rewards/parts",
        "mine/evaluate",
        "mine/rollout",
        "evaluate",
        "report",
        "trainer",
        "plot",
    ):
        (tmp_path / f"{name}.py").write_text(f"VALUE = {1 if name.startswith('mine') else 10}\n")
    (tmp_path / "mine" / "rewards" / "__init__.py").touch()
    (tmp_path / "mine" / "reward.py").write_text(REWARD)
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCORE, mode],
        env={**os.environ, "PYTHONPATH": f"{ROOT}/scripts:{ROOT}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "22.0 None\n", done.stderr
