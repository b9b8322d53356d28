"""Factories of the parts of a run."""

from __future__ import annotations

import asyncio

import pytest

from lockstep.rollout.errors import ConfigError
from lockstep.rollout.records import EngineCall, FinishReason, Rollout
from lockstep.trainer.build import make_gateway_settings, make_rewards
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.config.schema import Config


def test_settings_of_the_algorithm_shape_rewards() -> None:
    config = Config(
        algorithm=AlgorithmConfig(turn_rewards=True, overlong_buffer=0.5, overlong_penalty=2.0, max_completion_tokens=8)
    )
    config.reward.functions = ["repetition"]
    call = EngineCall(
        prompt_ids=(1,), sampled_ids=(5,) * 6, sampled_logprobs=(-1.0,) * 6, finish_reason=FinishReason.STOP
    )
    given = Rollout(rollout_id=0, group_id=0, calls=(call,), outcome={"turn_rewards": [0.5]})
    (scored,) = asyncio.run(make_rewards(config).score([given]))
    assert (scored.reward, scored.rewards) == (-0.5, {"repetition": 0.0, "turns": 0.5, "overlong": -1.0})
    config.algorithm.max_completion_tokens = None
    config.environment.max_turns, config.rollout.max_tokens_per_turn = 3, 2
    (scored,) = asyncio.run(make_rewards(config).score([given]))
    assert scored.rewards["overlong"] == -2.0, "the horizon of the configuration"


def test_a_gateway_serves_the_model_and_adapters_under_different_names() -> None:
    config = Config()
    config.model.path, config.model.adapters = "models/calculator", {"last": "runs/a"}
    config.model.images.max_per_prompt = 3
    settings = make_gateway_settings(config.gateway, config.model)
    assert (settings.model_name, settings.adapters, settings.max_images) == ("calculator", ("last",), 3)
    config.gateway.model_name = "last"
    with pytest.raises(ConfigError, match="last is the name of the model without adapters"):
        make_gateway_settings(config.gateway, config.model)
