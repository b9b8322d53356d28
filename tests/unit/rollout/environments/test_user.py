"""Simulated users by script and by function."""

from __future__ import annotations

import pytest

from lockstep.rollout.environments.user import SimulatedUser
from lockstep.rollout.errors import DataError
from tests.fixtures.turns import say


async def test_a_scripted_user_says_its_turns_and_then_ends_the_episode():
    environment = SimulatedUser(turns=["and then?", "thanks"])
    await environment.reset({"question": "q"})
    said = []
    while not (step := await environment.step(say("a"))).done:
        said += [turn["content"] for turn in step.messages]
        assert step.outcome == {"user_turns": 1}
    assert said == ["and then?", "thanks"]


async def test_the_rows_script_replaces_the_settings():
    environment = SimulatedUser(turns=["from settings"])
    await environment.reset({"question": "q", "user_turns": ["from the row"]})
    assert (await environment.step(say("a"))).messages[0]["content"] == "from the row"
    with pytest.raises(DataError, match="list of texts"):
        await environment.reset({"question": "q", "user_turns": "one text"})


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_user_function_reads_the_conversation(is_async):
    def reply(conversation):
        return f"turn {len(conversation)}" if len(conversation) < 4 else None

    async def reply_async(conversation):
        return reply(conversation)

    environment = SimulatedUser(reply_async if is_async else reply)
    await environment.reset({"question": "q"})
    assert (await environment.step(say("a"))).messages == ({"role": "user", "content": "turn 2"},)
    assert (await environment.step(say("b"))).done
