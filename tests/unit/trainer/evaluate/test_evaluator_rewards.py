"""Rewards of an evaluation: those of the reward functions, without the shaping of the training algorithm."""

from __future__ import annotations

import json
from pathlib import Path

from lockstep.rewards.composition import Reward, RewardSet
from lockstep.rewards.shaping import Shaping
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.trainer.collect.driving import Drivers
from lockstep.trainer.collect.episodes import Episodes
from lockstep.trainer.config.schema import Config
from lockstep.trainer.data.prompts import heldout_data
from lockstep.trainer.evaluate.evaluator import Evaluator
from tests.unit.rewards.test_shaping import rollout


class FakeSampler:
    async def collect(self, examples, *, on_group, **settings) -> None:
        for _ in examples:
            on_group([rollout(8, turn_rewards=[1.0])])


def test_an_evaluation_that_shares_the_rewards_of_a_run_is_not_shaped(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "q", "answer": "7"}) + "\n")
    config = Config()
    config.data.heldout_path = str(tmp_path / "rows.jsonl")
    shaping = Shaping(turn_rewards=True, horizon=8, overlong_buffer=0.5)
    rewards = RewardSet([Reward(name="half", function=lambda found: 0.5)], shaping=shaping)
    with BackgroundLoop() as loop:
        evaluator = Evaluator(
            config.eval,
            heldout_data(config.heldout_sets(), config.environment, config.reward),
            episodes=Episodes(drivers=Drivers(loop), sampler=FakeSampler(), rewards=rewards),  # type: ignore[arg-type]
            sampling=Sampling(max_tokens=8),
        )
        found = evaluator.evaluate().rollouts
    assert [(one.reward, one.rewards) for one in found] == [(0.5, {"half": 0.5})] * len(found)
    assert found
    assert "reward/half/mean" not in rewards.take_metrics()
