"""Classes written for TRL's environment_factory, run unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.integrations.environments.trl import TRLEnvironment
from lockstep.rewards.composition import make_reward_set
from lockstep.rollout.environments import make_environment
from lockstep.rollout.errors import ConfigError, DataError
from lockstep.rollout.records import RolloutStatus
from tests.fixtures.policies import Policy, last_turn, play, tool_call


class Guess:
    """Guess a number. Written for `GRPOTrainer(environment_factory=Guess)`."""

    def __init__(self):
        self.tries = 0

    @property
    def never_read(self) -> str:
        raise AssertionError("listing tools must not evaluate properties")

    def reset(self, *, target: int, **row: Any) -> str:
        self.target = target
        self.row = row
        return " (between 0 and 9)"

    def guess(self, number: int) -> str:
        """Make a guess.

        Args:
            number: between 0 and 9
        """
        self.tries += 1
        if number > 9:
            raise ValueError("too large")
        return "right" if number == self.target else "wrong"

    async def hint(self) -> str:
        """Get a hint."""
        return "it is odd" if self.target % 2 else "it is even"

    def _private(self) -> None: ...

    async def get_reward(self) -> float:
        return 1.0 / self.tries


class Silent:
    """No observation, no reward, no prompt in the data."""

    def reset(self, **row: Any) -> None: ...

    def wait(self) -> str:
        """Wait."""
        return "waited"


def guesses(prompt: str) -> str:
    said = last_turn(prompt)
    if "right" in said:
        return "I found it"
    if "wrong" in said:
        return tool_call("guess", number=7)
    return tool_call("hint") + "\n" + tool_call("guess", number=3)


ROW = {"question": "guess my number", "target": 7}


async def test_an_episode_has_the_methods_as_tools_and_the_reward_of_the_class():
    rollout = await play(TRLEnvironment(Guess), Policy(guesses), example=ROW)
    assert rollout.status is RolloutStatus.COMPLETED
    assert rollout.messages[0]["content"] == "guess my number (between 0 and 9)"
    assert [turn["content"] for turn in rollout.messages if turn["role"] == "tool"] == ["it is odd", "wrong", "right"]
    assert rollout.outcome["environment_reward"] == 0.5
    (scored,) = await make_reward_set(["environment_reward"]).score([rollout])
    assert scored.reward == 0.5


async def test_tools_are_the_public_methods():
    environment = TRLEnvironment(Guess)
    await environment.reset(ROW)
    assert sorted(tool["function"]["name"] for tool in environment.tools) == ["guess", "hint"]


async def test_the_reward_is_read_at_the_limit_of_turns_too():
    rollout = await play(TRLEnvironment(Guess), Policy(guesses), example=ROW, max_turns=1)
    assert rollout.status is RolloutStatus.MAX_TURNS
    assert rollout.outcome["environment_reward"] == 1.0


async def test_reset_gets_the_row_without_the_column_that_names_the_factory():
    environment = TRLEnvironment({"guess": Guess, "silent": Silent})
    await environment.reset({**ROW, "environment": "guess", "timeout_s": 3})
    assert environment._instance.row == {"question": "guess my number", "timeout_s": 3}
    opening = await environment.reset({"environment": "silent"})
    assert opening == ({"role": "user", "content": ""},)
    assert [tool["function"]["name"] for tool in environment.tools] == ["wait"]
    with pytest.raises(DataError, match="'chess'"):
        await environment.reset({"environment": "chess"})


async def test_an_error_in_get_reward_fails_the_reward_and_not_the_run():
    rollout = await play(TRLEnvironment(Guess), Policy(lambda prompt: "no tool"), example=ROW)
    assert "division by zero" in rollout.outcome["environment_error"]
    rewards = make_reward_set(["environment_reward"])
    (scored,) = await rewards.score([rollout])
    assert scored.status is RolloutStatus.FAILED
    assert "division by zero" in (scored.error or "")


@pytest.mark.parametrize(
    ("produce", "says"),
    [(lambda: 10**400, "does not fit a float"), (lambda: {}[10**5000], "KeyError")],
    ids=["value", "error"],
)
async def test_a_reward_that_cannot_be_written_fails_the_reward_and_not_the_run(produce, says):
    class Endless(Guess):
        async def get_reward(self) -> float:
            return produce()

    rollout = await play(TRLEnvironment(Endless), Policy(lambda prompt: "no tool"), example=ROW)
    assert says in rollout.outcome["environment_error"]


async def test_a_missing_factory_and_a_missing_reset_are_refused():
    with pytest.raises(ConfigError, match=r"settings\.factory=path"):
        TRLEnvironment()
    with pytest.raises(ConfigError, match="dict has no method reset"):
        await TRLEnvironment(dict).reset(ROW)


async def test_a_factory_is_loaded_from_a_file(tmp_path: Path):
    file = tmp_path / "game.py"
    file.write_text(
        "class Game:\n    def reset(self, **row): return None\n    def get_reward(self) -> float: return 0.25\n"
    )
    rollout = await play(make_environment("trl", factory=f"{file}:Game"), Policy(lambda prompt: "hm"), example=ROW)
    assert rollout.outcome == {"tool_calls": 0, "tool_errors": 0, "environment_reward": 0.25}
