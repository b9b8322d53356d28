"""Environments of Gymnasium, played by a scripted policy."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.rollout.environments import make_environment
from lockstep.rollout.errors import ConfigError, DataError
from lockstep.rollout.records import RolloutStatus
from tests.fixtures.policies import Policy, play

pytest.importorskip("gymnasium")

LAKE = {
    "env_id": "FrozenLake-v1",
    "settings": {"is_slippery": False},
    "actions": ["left", "down", "right", "up"],
}
WAY = ["down", "down", "right", "right", "down", "right"]
"""The shortest way over the lake of 4 x 4 fields."""


async def played(*turns: str, seed: int = 3, **settings: Any) -> Any:
    remaining = list(turns)
    policy = Policy(lambda prompt: remaining.pop(0))
    return await play(
        make_environment("gymnasium", **{**LAKE, **settings}), policy, example={"seed": seed}, max_turns=12
    )


async def test_the_names_of_actions_lead_over_the_lake() -> None:
    rollout = await played("swim", *WAY[:-1], " Right.")
    assert rollout.status is RolloutStatus.COMPLETED
    assert rollout.outcome == {"environment_reward": 1.0, "moves": 6, "finished": 1, "invalid_actions": 1}
    first, *_ = rollout.messages
    assert "SFFF" in first["content"].replace("\x1b[41mS\x1b[0m", "S")
    assert first["content"].endswith("Answer with one of: left, down, right, up.")


async def test_an_episode_without_end_has_a_reward_of_zero() -> None:
    rollout = await played(*["up"] * 12)
    assert rollout.status is RolloutStatus.MAX_TURNS
    assert rollout.outcome == {"environment_reward": 0.0, "moves": 12, "finished": 0}


async def test_the_seed_of_a_row_decides_what_happens() -> None:
    slippery = {"settings": {"is_slippery": True}}
    ways = [[m["content"] for m in (await played(*["down"] * 12, seed=s, **slippery)).messages] for s in (1, 1, 2, 3)]
    assert ways[0] == ways[1]
    assert len({str(way) for way in ways}) > 1


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"actions": ["left", "right"]}, "FrozenLake-v1 has 4 actions, environment.settings.actions names 2"),
        ({"env_id": "Pendulum-v1", "settings": {}}, "expected discrete actions from 0"),
        ({"env_id": "FrozenLack-v1"}, "FrozenLack"),
    ],
)
async def test_settings_that_do_not_fit_end_the_run(settings: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        await played("left", **settings)


def test_actions_of_one_name_and_rows_without_a_seed_are_refused() -> None:
    with pytest.raises(ConfigError, match="a name of its own"):
        make_environment("gymnasium", actions=["left", "Left "])
    with pytest.raises(DataError, match=r"column seed holds None.*data.path=seeds:1000"):
        make_environment("gymnasium", **LAKE).read_row({})
