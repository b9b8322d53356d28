"""The code on the pages about tokens and environments runs, and their commands are accepted."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from lockstep.rewards.composition import make_reward_set
from lockstep.rollout.environments import environment_names, make_environment
from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.records import Rollout, RolloutStatus
from lockstep.rollout.sampler.sampler import Sampler
from lockstep.trainer.checks.validate import validate
from lockstep.trainer.compose import CONFIG_DIR
from lockstep.trainer.config.schema import Config
from tests.fixtures.composed import composed as compose
from tests.fixtures.pages import bash_blocks, page_files
from tests.fixtures.policies import CHAT, Policy, last_turn, play, sampling, tool_call

DOCS = CONFIG_DIR.parent / "docs"


def blocks(page: str, language: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    assert found, f"{page} has no {language} blocks"
    return found


def commands() -> list[list[str]]:
    pages = [DOCS / "environments.md", DOCS / "sandbox.md", DOCS / "distillation.md"]
    found = [command for page in pages for block in bash_blocks(page) for command in block.commands]
    return [shlex.split(command)[2:] for command in found if re.search(r"\blockstep train\b", command)]


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A reader's directory: the files of the page, a model, data files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SANDBOX_TOKEN", "secret")
    for name, text in page_files(DOCS / "environments.md").items():
        Path(name).write_text(text)
    Path("benchmarks").symlink_to(DOCS.parent / "benchmarks")
    for model in (".", "models/teacher", "runs/hinted/model"):
        Path(model).mkdir(parents=True, exist_ok=True)
        Path(model, "config.json").write_text("{}")
    talk = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    Path("hinted.jsonl").write_text(json.dumps({"messages": talk, "answer": "2"}) + "\n")
    Path("runs/taught").mkdir()
    for saved in ("teacher.jsonl", "runs/taught/step-000001.jsonl"):
        Path(saved).touch()  # read after the checks of the settings
    for name in ("rows", "gsm8k", "numbers", "targets"):
        Path(f"{name}.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    return tmp_path


def composed(directory: Path, *overrides: str) -> Config:
    own = (f"model.path={directory}", f"data.path={directory}/rows.jsonl", "data.heldout_path=null")
    return compose(*own, *(word for word in overrides if not word.endswith("=...")))


PACKAGES = {"textarena": "textarena", "benchmarks/environments/guess.py:Guess": "textarena"}
"""Packages that are not among those of the tests, by environment."""


@pytest.mark.parametrize("overrides", commands(), ids=lambda overrides: overrides[0])
def test_a_command_on_the_page_is_accepted(overrides: list[str], directory: Path):
    config = composed(directory, *overrides)
    package = PACKAGES.get(config.environment.name)
    if package is not None:
        pytest.importorskip(package, reason=f"pip install {package} to check its command")
    if config.environment.name == "verifiers":  # its package, or the environment's, may not be installed
        assert config.environment.settings["env_id"] in ("gsm8k", "gsm8k-v1", "digit-tasks")
        return
    elsewhere = config.environment.name == "sandbox" and config.environment.settings["sandbox"] != "local"
    validate(config, needs_data=not elsewhere)  # a service or a daemon is asked together with the data
    make_environment(config.environment.name, **config.environment.settings)
    if config.has_rollouts:
        make_reward_set(config.reward.functions)


def test_every_environment_is_on_the_page():
    named = set(
        re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", (DOCS / "environments.md").read_text(), re.M)))
    )
    assert named == set(environment_names())


@pytest.mark.parametrize("block", blocks("tokens.md", "python"))
def test_an_example_about_tokens_is_true(block: str):
    exec(compile(block, "docs/tokens.md", "exec"), {})


def assert_all_trained(rollout: Rollout) -> None:
    assert sum(row.num_trained for row in rows_from_calls(rollout.calls)) == rollout.num_sampled > 0


async def test_the_environment_of_gymnasium_plays(directory: Path):
    moves = iter(("down", "up and down", "down", "right", "right", "down", "right"))
    environment = make_environment(f"{directory}/my_lake.py:Lake")
    rollout = await play(environment, Policy(lambda _: next(moves)), example={"seed": 0}, max_turns=12)
    assert rollout.error is None
    assert rollout.status is RolloutStatus.COMPLETED
    assert rollout.outcome == {"environment_reward": 1.0, "invalid": 1}
    assert_all_trained(rollout)


async def test_the_minimal_environment_plays(directory: Path):
    def policy(prompt: str) -> str:
        return "42" if "wrong" in last_turn(prompt) else "7"

    environment = make_environment(f"{directory}/my_env.py:Guess")
    rollout = await play(environment, Policy(policy), example={"question": "guess my number", "number": 42})
    assert rollout.status is RolloutStatus.COMPLETED
    assert rollout.outcome == {"guesses": 1, "found": 1}
    (scored,) = await make_reward_set([f"{directory}/my_env.py:found"]).score([rollout])
    assert scored.reward == pytest.approx(0.9)
    assert_all_trained(rollout)


async def test_the_tool_searches(directory: Path):
    def policy(prompt: str) -> str:
        return "7431" if "tool_response" in last_turn(prompt) else tool_call("search", query="code", limit=1)

    rollout = await play(make_environment("tools", files=[f"{directory}/my_tools.py:search"]), Policy(policy))
    assert "the code is 7431" in rollout.messages[-2]["content"]


async def test_the_doubtful_user_asks_once(directory: Path):
    rollout = await play(make_environment(f"{directory}/my_user.py:environment"), Policy(lambda prompt: "yes"))
    assert [message["content"] for message in rollout.messages] == ["go", "yes", "Are you sure?", "yes"]


async def test_the_debate_has_three_voices(directory: Path):
    def policy(prompt: str) -> str:
        return next((kind for kind in ("strict", "kind") if f"You are {kind}" in prompt), "a draft")

    rollout = await play(make_environment(f"{directory}/my_debate.py:Debate"), Policy(policy), max_turns=2)
    assert [message["content"] for message in rollout.messages if message["role"] == "user"][1:] == ["strict\nkind"] * 2
    assert len(rollout.calls) == 6
    assert rollout.outcome == {"debated": 1}
    assert_all_trained(rollout)


async def test_the_trl_class_plays(directory: Path):
    def policy(prompt: str) -> str:
        return "found" if "right" in last_turn(prompt) else tool_call("guess", number=3)

    example: dict[str, Any] = {"question": "guess", "target": 3}
    rollout = await play(
        make_environment("trl", factory=f"{directory}/my_game.py:Number"), Policy(policy), example=example
    )
    assert rollout.messages[0]["content"] == "guess It is between 0 and 9."
    assert rollout.outcome["environment_reward"] == 1.0


async def test_the_rollout_func_asks_twice(directory: Path):
    def policy(prompt: str) -> str:
        return "yes" if "sure" in last_turn(prompt) else "7"

    environment = make_environment("trl_rollout", rollout_func=f"{directory}/my_rollout.py:play")
    sampler = Sampler(engine=Policy(policy), chat=CHAT, make_environment=lambda: environment, max_turns=2, seed=1)
    (rollout,) = await sampler.collect([{"question": "go"}], samples_per_prompt=1, sampling=sampling(), step=0)
    assert rollout.error is None
    assert [message["content"] for message in rollout.messages] == ["go", "7", "yes"]
    assert rollout.outcome == {"environment_reward": 1.0}
    assert len(rows_from_calls(rollout.calls)) == 1
    assert_all_trained(rollout)
