"""Environments written for TRL and for verifiers, run as they are."""

from __future__ import annotations

import importlib.util
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rewards.composition import make_reward_set
from rollout.environments import make_environment
from rollout.environments.trl import TRLEnvironment
from rollout.episode.rows import rows_from_calls
from rollout.errors import ConfigError, DataError
from rollout.records import RolloutStatus
from rollout.sampler.sampler import Sampler
from tests.fixtures.gateway import ScriptedEngine, says
from tests.fixtures.paths import FIXTURES
from tests.fixtures.policies import CHAT, TOKENIZER, Policy, last_turn, play, sampling, tool_call

FIXTURES = FIXTURES / "verifiers_environments"
needs_verifiers = pytest.mark.skipif(
    importlib.util.find_spec("verifiers") is None, reason="pip install 'verifiers<0.3' to run environments of it"
)


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


async def test_a_trl_environment_plays_with_its_methods_as_tools_and_its_own_reward():
    rollout = await play(TRLEnvironment(Guess), Policy(guesses), example=ROW)
    assert rollout.status is RolloutStatus.COMPLETED
    assert rollout.messages[0]["content"] == "guess my number (between 0 and 9)"
    assert [turn["content"] for turn in rollout.messages if turn["role"] == "tool"] == ["it is odd", "wrong", "right"]
    assert rollout.outcome["environment_reward"] == 0.5
    (scored,) = await make_reward_set(["environment_reward"]).score([rollout])
    assert scored.reward == 0.5


async def test_trl_tools_are_the_public_methods():
    environment = TRLEnvironment(Guess)
    await environment.reset(ROW)
    assert sorted(tool["function"]["name"] for tool in environment.tools) == ["guess", "hint"]


async def test_the_reward_is_asked_for_however_the_episode_ends():
    rollout = await play(TRLEnvironment(Guess), Policy(guesses), example=ROW, max_turns=1)
    assert rollout.status is RolloutStatus.MAX_TURNS
    assert rollout.outcome["environment_reward"] == 1.0


async def test_reset_gets_the_row_without_the_column_that_routes():
    environment = TRLEnvironment({"guess": Guess, "silent": Silent})
    await environment.reset({**ROW, "environment": "guess", "timeout_s": 3})
    assert environment._instance.row == {"question": "guess my number", "timeout_s": 3}
    opening = await environment.reset({"environment": "silent"})
    assert opening == ({"role": "user", "content": ""},)
    assert [tool["function"]["name"] for tool in environment.tools] == ["wait"]
    with pytest.raises(DataError, match="'chess'"):
        await environment.reset({"environment": "chess"})


async def test_a_reward_that_fails_is_a_failed_reward_and_not_a_failed_run():
    rollout = await play(TRLEnvironment(Guess), Policy(lambda prompt: "no tool"), example=ROW)
    assert "division by zero" in rollout.outcome["environment_error"]
    rewards = make_reward_set(["environment_reward"])
    (scored,) = await rewards.score([rollout])
    assert scored.status is RolloutStatus.FAILED
    assert "division by zero" in (scored.error or "")


async def test_trl_mistakes_are_named():
    with pytest.raises(ConfigError, match=r"settings\.factory=path"):
        TRLEnvironment()
    with pytest.raises(ConfigError, match="dict has no method reset"):
        await TRLEnvironment(dict).reset(ROW)


async def test_a_trl_factory_comes_from_a_file(tmp_path: Path):
    file = tmp_path / "game.py"
    file.write_text(
        "class Game:\n    def reset(self, **row): return None\n    def get_reward(self) -> float: return 0.25\n"
    )
    rollout = await play(make_environment("trl", factory=f"{file}:Game"), Policy(lambda prompt: "hm"), example=ROW)
    assert rollout.outcome == {"tool_calls": 0, "tool_errors": 0, "environment_reward": 0.25}


# --- verifiers


def test_what_verifiers_lacks_is_said_before_anything_starts():
    with pytest.raises(ConfigError, match=r"settings\.env_id="):
        make_environment("verifiers")
    missing = "pip install 'verifiers<0.3'" if importlib.util.find_spec("verifiers") is None else "is not installed"
    with pytest.raises(ConfigError, match=missing):
        make_environment("verifiers", env_id="owner/no-such-environment")


@needs_verifiers
async def test_a_verifiers_environment_is_trained_on_what_it_sampled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(FIXTURES)
    handler = signal.getsignal(signal.SIGINT)
    make_environment("verifiers", env_id="verifiers-word-env", args={"turns": 2})
    assert signal.getsignal(signal.SIGINT) is handler, "Ctrl-C belongs to the run, not to the package"
    engine = ScriptedEngine(says(TOKENIZER, "two it is<|im_end|>"))
    sampler = Sampler(
        engine=engine,
        chat=CHAT,
        make_environment=partial(make_environment, "verifiers", env_id="verifiers-word-env", args={"turns": 2}),
        max_turns=4,
        seed=0,
    )
    rows = [{"prompt": [{"role": "user", "content": f"say {word}"}], "answer": word} for word in ("one", "two")]
    rollouts = await sampler.collect(rows, samples_per_prompt=2, sampling=sampling(), step=0)
    assert [rollout.error for rollout in rollouts] == [None] * 4
    assert [rollout.outcome["environment_reward"] for rollout in rollouts] == [0.0, 0.0, 1.0, 1.0]
    assert [rollout.outcome["verifiers_begins_with"] for rollout in rollouts] == [0.0, 0.0, 1.0, 1.0]
    for rollout in rollouts:
        assert len(rollout.calls) == 2
        (row,) = rows_from_calls(rollout.calls)
        assert row.num_trained == rollout.num_sampled


@needs_verifiers
async def test_a_verifiers_rollout_beyond_the_limit_of_turns_is_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(FIXTURES)
    sampler = Sampler(
        engine=ScriptedEngine(says(TOKENIZER, "two it is<|im_end|>")),
        chat=CHAT,
        make_environment=partial(make_environment, "verifiers", env_id="verifiers-word-env", args={"turns": 3}),
        max_turns=2,
        seed=0,
    )
    rows = [{"prompt": [{"role": "user", "content": "say two"}], "answer": "two"}]
    (rollout,) = await sampler.collect(rows, samples_per_prompt=1, sampling=sampling(), step=0)
    assert rollout.status is RolloutStatus.MAX_TURNS
    assert len(rollout.calls) == 2
