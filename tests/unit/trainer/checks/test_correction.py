"""Bounds of correction weights."""

from __future__ import annotations

import pytest

from lockstep.trainer.checks.correction import correction_problems, gateway_problems
from lockstep.trainer.config.schema import Config


def of(config: Config) -> list[str]:
    return list(correction_problems(config.correction, config.algorithm, config.model))


def problems(mode: str, low: float, high: float) -> list[str]:
    config = Config()
    config.correction.mode, config.correction.low, config.correction.high = mode, low, high
    return of(config)


@pytest.mark.parametrize("mode", ["token_mask", "sequence_mask", "sequence_product_mask"])
def test_a_mask_that_excludes_tokens_on_policy_is_refused(mode: str) -> None:
    for low, high in ((1.5, 2.0), (0.1, 0.9)):
        (problem,) = problems(mode, low, high)
        assert "exclude 1" in problem
        assert "set correction.low=0.5 correction.high=2.0" in problem
    for low, high in ((0.5, 2.0), (1.0, 2.0), (0.0, 1.0)):
        assert problems(mode, low, high) == []


def test_truncation_only_scales_such_tokens_so_it_is_accepted() -> None:
    assert problems("token_truncate", 0.0, 0.9) == []


def replay_problems(replay: str, **changes: object) -> list[str]:
    config = Config()
    config.correction.routing_replay = replay
    for name, value in changes.items():
        section, setting = name.split("__")
        setattr(getattr(config, section), setting, value)
    return of(config)


def test_routes_are_replayed_only_where_that_works() -> None:
    assert replay_problems("engine") == []
    assert replay_problems("old", algorithm__minibatches=2) == []
    (problem,) = replay_problems("old")
    assert "no effect with one update per rollout batch" in problem
    assert "set algorithm.minibatches=2, or correction.routing_replay=engine" in problem
    (problem,) = replay_problems("engine", model__attn_implementation="sdpa")
    assert "found model.attn_implementation=sdpa; set model.attn_implementation=auto" in problem
    assert replay_problems("engine", model__compile=True) == []
    assert replay_problems("engine", correction__logp_old="bypass", correction__mode="off") == []
    (problem,) = replay_problems("old", correction__logp_old="bypass", correction__mode="off")
    assert "which correction.logp_old=bypass leaves out" in problem


@pytest.mark.parametrize("loss", ["dppo", "m2po", "vespo"])
def test_weights_are_refused_where_the_ratio_of_the_loss_takes_their_place(loss: str) -> None:
    config = Config()
    config.algorithm.loss = loss
    assert of(config) == []
    config.correction.mode, config.correction.high = "token_mask", 3.0
    first, second = of(config)
    assert f"correction.mode=token_mask has no effect with algorithm.loss={loss}" in first
    assert "set correction.mode=token_truncate, or algorithm.loss=ppo_clip" in first
    assert "set correction.high=2.0" in second
    config.correction.mode = "off"
    assert of(config) == []
    config.algorithm.loss, config.correction.mode = "opsm", "token_mask"
    assert of(config) == []


@pytest.mark.parametrize(
    ("name", "settings", "is_refused"),
    [
        ("agent", {}, True),
        ("verifiers", {}, True),
        ("mixed", {"environments": {"mixed": {"environments": {"agent": {}}}}}, True),
        ("mixed", {"environments": {"tools": {}}}, False),
        ("trl_rollout", {}, False),
    ],
)
def test_agents_in_flight_hold_a_port_of_the_gateway(name: str, settings: dict, is_refused: bool) -> None:
    config = Config()
    config.environment.name, config.environment.settings = name, settings
    config.gateway.port = 8123
    problems = gateway_problems(config.gateway, config.environment, every=5)
    assert any("gateway.port=8123" in problem for problem in problems) == is_refused
