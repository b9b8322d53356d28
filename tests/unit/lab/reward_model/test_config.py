"""Settings of reward model training."""

from __future__ import annotations

import pytest

from lockstep.lab.reward_model.config import RewardModelConfig, check
from lockstep.rollout.errors import ConfigError


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("optimizer.schedule", "constnat", "optimizer.schedule=constnat is not one of .* 'constant'"),
        ("optimizer.name", "adamx", "optimizer.name=adamx is not one of"),
        ("model.dtype", "fp16", "model.dtype=fp16 is not one of float32, bfloat16"),
        ("optimizer.betas", [0.9, 1.0], "must be 2 numbers"),
        ("optimizer.lr", float("nan"), "optimizer.lr=nan is not a finite number"),
        ("optimizer.warmup_updates", -1, "must be at least 0"),
        ("optimizer.spike", "skip", "optimizer.spike=skip has no effect on reward model training"),
        ("logger.print_rollouts", 3, "has no effect"),
        ("data.query_tokens", -1, "must be at least 1"),
        ("data.response_tokens", 0, "must be at least 1"),
        ("data.max_tokens", -3, "must be at least 1"),
        ("data.max_comparisons", 0, "must be at least 1"),
        ("normalization.stop_after", -1, "must be at least 0"),
    ],
)
def test_invalid_settings_are_refused(path, value, sentence):
    config = RewardModelConfig()
    group, _, name = path.partition(".")
    setattr(getattr(config, group), name, value)
    with pytest.raises(ConfigError, match=sentence):
        check(config)


def test_an_empty_run_name_is_refused():
    with pytest.raises(ConfigError, match="run_name= is empty"):
        check(RewardModelConfig(run_name=""))
