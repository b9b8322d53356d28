"""Several environments in one run, chosen by the row."""

from __future__ import annotations

import pytest

from rollout.environments import make_environment
from rollout.errors import ConfigError, DataError
from tests.fixtures.turns import say, use


async def test_mixed_becomes_the_environment_that_the_row_names():
    environment = make_environment(
        "mixed", environments={"calculator": {}, "single_turn": {}}, default="single_turn", system_prompt="be brief"
    )
    assert environment.tools == ()
    opening = await environment.reset({"question": "q", "environment": "calculator"})
    assert [turn["role"] for turn in opening] == ["system", "user"]
    assert [tool["function"]["name"] for tool in environment.tools] == ["calculator"]
    assert not (await environment.step(use("calculator", expression="1+1"))).done
    await environment.reset({"question": "q"})
    assert environment.tools == ()
    assert (await environment.step(say("a"))).done


async def test_a_row_or_a_default_with_an_unknown_name_is_refused():
    environment = make_environment("mixed", environments={"calculator": {}})
    with pytest.raises(DataError, match="'chess'"):
        await environment.reset({"question": "q", "environment": "chess"})
    with pytest.raises(DataError, match="None"):
        await environment.reset({"question": "q"})
    with pytest.raises(ConfigError, match="default"):
        make_environment("mixed", environments={"calculator": {}}, default="chess")
