"""Hosts that answer what no game answers: each lie costs its episode."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from lockstep.integrations.environments import textarena, verifiers_tasks
from lockstep.integrations.environments.textarena import TextArenaEnvironment
from lockstep.rollout.errors import ConfigError, EnvironmentFault
from lockstep.rollout.hosts.process import host
from lockstep.rollout.records import Rollout, RolloutStatus
from tests.fixtures.paths import FIXTURES
from tests.fixtures.policies import Policy, play

pytestmark = pytest.mark.long

PROGRAM = FIXTURES / "host_programs" / "lying_games.py"
TURN = "{'is_done': False, 'player': 0, 'text': 'guess'}"
END = "{'is_done': True, 'rewards': {'0': %s}, 'facts': {'0': {'is_invalid': False}}}"


@pytest.fixture(autouse=True)
def lying(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(textarena, "PROGRAM", PROGRAM)
    monkeypatch.setattr(verifiers_tasks, "PROGRAM", PROGRAM)
    yield
    host(sys.executable, PROGRAM).end()


async def game(monkeypatch: pytest.MonkeyPatch, *, open: str = TURN, act: str = TURN) -> Rollout:
    monkeypatch.setenv("LIES", json.dumps({"open": open, "act": act}))
    environment = TextArenaEnvironment(python=sys.executable, env_id="Game-v0", timeout_s=30.0)
    return await play(environment, Policy(lambda prompt: "[7]"), example={"seed": 1}, max_turns=2)


LIES = [
    *("None", "5", "'text'", "[]", "{}", "{'is_done': 1}", "{'is_done': None}"),
    *("{'is_done': False}", "{'is_done': False, 'text': 'x'}", "{'is_done': False, 'player': '0', 'text': 'x'}"),
    *("{'is_done': False, 'player': True, 'text': 'x'}", "{'is_done': False, 'player': 0, 'text': ['x']}"),
    *("{'is_done': False, 'player': float('inf'), 'text': 'x'}", "{'is_done': False, 'player': 7, 'text': 'x'}"),
    *("{'is_done': True}", "{'is_done': True, 'rewards': [], 'facts': {}}"),
    "{'is_done': True, 'rewards': {}, 'facts': {}}",
    *("'x' * 2**23", "1 / 0", "exit(3)", "object()"),
    "(lambda f: f(f, 200))(lambda f, n: [f(f, n - 1)] if n else [])",
]  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("do", ["open", "act"])
async def test_an_answer_of_another_form_fails_the_episode(do: str, lie: str, monkeypatch: pytest.MonkeyPatch):
    rollout = await game(monkeypatch, **{do: lie})
    assert rollout.status is RolloutStatus.FAILED, rollout.outcome
    assert str(rollout.error).startswith(("EnvironmentFault: ", "DataError: "))


@pytest.mark.parametrize("reward", ["float('inf')", "float('nan')", "10**400", "1e300", "'1'", "[1]", "None", "{}"])
async def test_a_reward_that_is_not_a_finite_number_fails_the_episode(reward: str, monkeypatch: pytest.MonkeyPatch):
    rollout = await game(monkeypatch, act=END % reward)
    assert rollout.status is RolloutStatus.FAILED
    assert "the game ended without a reward of player 0" in str(rollout.error)
    assert host(sys.executable, PROGRAM).is_alive, "other games go on"


async def test_settings_are_refused_at_the_opening_only(monkeypatch: pytest.MonkeyPatch):
    wrong = "(_ for _ in ()).throw(WrongSetting('no such game'))"
    with pytest.raises(ConfigError, match="no such game"):
        await game(monkeypatch, open=wrong)
    host(sys.executable, PROGRAM).end()
    rollout = await game(monkeypatch, act=wrong)
    assert "EnvironmentFault: lying_games: no such game" in str(rollout.error)


@pytest.mark.parametrize(
    "played",
    ["None", "[]", "{'reward': 1.0}", "{'reward': 10**400, 'metrics': {}}", "{'reward': 1, 'metrics': {'a': 10**400}}",
     "{'reward': float('inf'), 'metrics': {}}", "{'reward': 1, 'metrics': {'a': float('nan')}}",
     "{'reward': '1', 'metrics': {}}",
     "{'reward': 1, 'metrics': {'a': 'text'}}", "{'reward': [1], 'metrics': {}}"],
)  # fmt: skip
async def test_a_score_of_another_form_is_an_error_of_the_episode(played: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LIES", json.dumps({"check": "'0.4'", "play": played}))
    tasks = verifiers_tasks.VerifiersTasks(sys.executable, "any", {}, timeout_s=30.0)
    with pytest.raises(EnvironmentFault, match="verifiers: the host answered"):
        await tasks.play("http://127.0.0.1:9/v1", "key", {"idx": 0})
