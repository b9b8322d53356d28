"""Episodes of one turn."""

from __future__ import annotations

from rollout.environments import make_environment
from tests.fixtures.turns import say


async def test_an_episode_ends_after_one_turn():
    environment = make_environment("single_turn", system_prompt="be brief")
    assert len(await environment.reset({"prompt": "q"})) == 2
    assert (await environment.step(say("a"))).done
