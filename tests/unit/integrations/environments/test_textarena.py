"""Games of the real TextArena, played by a scripted engine."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest

from lockstep.integrations.environments.textarena import PROGRAM, TextArenaEnvironment
from lockstep.rollout.environments import make_environment
from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.errors import ConfigError, EnvironmentFault
from lockstep.rollout.hosts.process import host
from lockstep.rollout.records import Rollout, RolloutStatus
from lockstep.rollout.sampler.sampler import Sampler
from tests.fixtures.gateway import ScriptedEngine, says
from tests.fixtures.interpreters import python_with
from tests.fixtures.policies import CHAT, TOKENIZER, sampling

GUESS = "GuessTheNumber-v0"


@pytest.fixture(scope="module")
def python() -> str:
    return python_with("textarena", "textarena")


async def play(python: str, text: str, rows: list[dict[str, Any]], *, max_turns: int = 12, **settings: Any):
    engine = ScriptedEngine(says(TOKENIZER, f"{text}<|im_end|>"))
    sampler = Sampler(
        engine=engine,
        chat=CHAT,
        make_environment=partial(make_environment, "textarena", **{"python": python, "env_id": GUESS, **settings}),
        max_turns=max_turns,
        seed=0,
    )
    return await sampler.collect(rows, samples_per_prompt=2, sampling=sampling(), step=0)


async def open_games(python: str) -> int:
    """Return the number of games that the host still holds."""
    return (await host(python, PROGRAM).ask("close", timeout_s=60, episode="none"))["open"]


def texts(rollout: Rollout) -> list[str]:
    return [message["content"] for message in rollout.messages if message["role"] == "user"]


async def test_games_of_one_seed_are_the_same_game_and_every_sampled_token_is_trained(python: str):
    rollouts = await play(python, "[7]", [{"seed": seed} for seed in range(8)])
    assert [rollout.error for rollout in rollouts] == [None] * 16
    for first, second in zip(rollouts[::2], rollouts[1::2], strict=True):
        assert first.messages == second.messages
        assert first.outcome == second.outcome
    hints = {re.search(r"higher|lower", " ".join(texts(rollout)[1:])) is not None for rollout in rollouts}
    assert hints == {True}
    assert len({text for rollout in rollouts for text in texts(rollout)[1:2]}) > 1, "seeds differ"
    for rollout in rollouts:
        (row,) = rows_from_calls(rollout.calls)
        assert row.num_trained == rollout.num_sampled
    assert await open_games(python) == 0


async def test_the_right_move_wins_and_an_unfinished_game_has_the_reward_of_the_setting(python: str):
    rollouts = [
        rollout
        for guess in range(1, 21)
        for rollout in (await play(python, f"[{guess}]", [{"seed": 3}], max_turns=1, unfinished_reward=-0.25))[:1]
    ]
    won = [rollout for rollout in rollouts if rollout.status is RolloutStatus.COMPLETED]
    assert [rollout.outcome["environment_reward"] for rollout in won] == [1.0]
    assert {rollout.outcome["environment_reward"] for rollout in rollouts} == {1.0, -0.25}
    assert {rollout.outcome["finished"] for rollout in rollouts} == {0, 1}


async def test_an_invalid_move_ends_as_the_game_says(python: str):
    (rollout, _) = await play(python, "I do not know", [{"seed": 0}])
    assert rollout.error is None
    assert rollout.outcome["invalid_move"] == 1
    assert rollout.outcome["environment_reward"] <= 0
    assert "invalid move" in texts(rollout)[1]


async def test_the_other_seats_are_played_by_the_users_function(python: str):
    def first_free(text: str) -> str:
        free = re.findall(r"\[(\d)\]", text.rpartition("Available Moves")[2])
        return f"[{free[0]}]"

    for seat in (0, 1):
        environment = TextArenaEnvironment(
            python=python, env_id="TicTacToe-v0", num_players=2, seat=seat, opponent=first_free
        )
        text = (await environment.reset({"seed": 1}))[0]["content"]
        assert f"You are Player {seat}" in text
        for _ in range(5):
            step = await environment.step({"role": "assistant", "content": first_free(text)})
            if step.done:
                break
            text = step.messages[0]["content"]
        assert step.done
        assert step.outcome["environment_reward"] in (-1, 0, 1)
        assert await environment.conclude() == {}
        await environment.close()
    assert await open_games(python) == 0

    def fails(text: str) -> str:
        raise KeyError("no move")

    environment = TextArenaEnvironment(python=python, env_id="TicTacToe-v0", num_players=2, seat=1, opponent=fails)
    with pytest.raises(EnvironmentFault, match="the opponent raised KeyError"):
        await environment.reset({"seed": 1})
    await environment.close()
    assert await open_games(python) == 0


async def test_a_host_that_dies_costs_its_episodes_and_no_other(python: str, monkeypatch: pytest.MonkeyPatch):
    played = TextArenaEnvironment.step

    async def step_or_kill(self: TextArenaEnvironment, message: Any) -> Any:
        host(python, PROGRAM).end()
        return await played(self, message)

    monkeypatch.setattr(TextArenaEnvironment, "step", step_or_kill)
    rollouts = await play(python, "[7]", [{"seed": 0}])
    assert [rollout.status for rollout in rollouts] == [RolloutStatus.FAILED] * 2
    assert all("EnvironmentFault: textarena_games: its process ended" in str(rollout.error) for rollout in rollouts)
    monkeypatch.undo()
    rollouts = await play(python, "[7]", [{"seed": 0}])
    assert [rollout.error for rollout in rollouts] == [None] * 2


async def test_wrong_games_settings_and_rows_are_refused(python: str):
    with pytest.raises(ConfigError, match="TextArena has no environment 'Gues-v0'"):
        await play(python, "[7]", [{"seed": 0}], env_id="Gues-v0")
    with pytest.raises(ConfigError, match="refuses its settings"):
        await play(python, "[7]", [{"seed": 0}], settings={"top": 3})
    rollouts = await play(python, "[7]", [{"question": "?"}])
    assert all("column seed holds None" in (rollout.error or "") for rollout in rollouts)
    with pytest.raises(ConfigError, match=r"num_players=2 needs moves for the other seats"):
        make_environment("textarena", python=python, env_id="TicTacToe-v0", num_players=2)


def test_a_missing_package_is_refused_when_the_environment_is_made(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"lockstep-rl\[textarena\]"):
        make_environment("textarena", env_id=GUESS)
