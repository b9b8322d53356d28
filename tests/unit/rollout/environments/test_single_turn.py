"""Episodes of one turn."""

from __future__ import annotations

import pytest

from lockstep.rollout.environments import make_environment
from lockstep.rollout.errors import ConfigError
from tests.fixtures.turns import say


async def test_an_episode_ends_after_one_turn():
    environment = make_environment("single_turn", system_prompt="be brief")
    assert len(await environment.reset({"prompt": "q"})) == 2
    assert (await environment.step(say("a"))).done


async def test_a_template_surrounds_the_row_s_prompt():
    environment = make_environment("single_turn", prompt_template="Solve: {prompt}\nBe brief, as in {this}.")
    (turn,) = await environment.reset({"prompt": "x = {prompt}?"})
    assert turn["content"] == "Solve: x = {prompt}?\nBe brief, as in {this}."


def test_a_template_without_the_prompt_is_refused():
    with pytest.raises(ConfigError, match=r"has no \{prompt\}.*prompt_template="):
        make_environment("single_turn", prompt_template="Be brief.")
