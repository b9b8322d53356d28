"""Names of functions that need something from the system."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.rollout.errors import ConfigError
from lockstep.rollout.sandbox import sandbox
from lockstep.trainer.checks.names import environment_problems, reward_name_problems, sandbox_problems
from lockstep.trainer.checks.validate import validate
from lockstep.trainer.config.schema import Config
from lockstep.trainer.config.user_code import runs_unisolated, unisolated_settings
from tests.fixtures.composed import demo as composed

CODE = "reward.functions=[code_tests]"
UNSAFE = "+reward.settings.code_tests.unsafe=true"


def lacks(config: Config) -> list[str]:
    return list(sandbox_problems(config.environment, config.reward))


def unisolated(config: Config) -> list[str]:
    return unisolated_settings(config.environment, config.reward)


def test_a_system_that_cannot_isolate_programs_is_refused_at_the_start(monkeypatch):
    monkeypatch.setattr(sandbox, "isolation_problem", lambda: "no namespaces here")
    assert lacks(composed(CODE)) == ["reward.functions names code_tests: no namespaces here"]
    assert lacks(composed(CODE, UNSAFE)) == []
    assert lacks(composed("reward.functions=[exact_match]")) == []


def test_only_true_turns_the_isolation_off():
    assert runs_unisolated(composed(CODE, UNSAFE).reward)
    assert not runs_unisolated(composed(CODE).reward)
    assert not runs_unisolated(composed(CODE, "+reward.settings.code_tests.unsafe=1").reward)
    assert not runs_unisolated(composed("reward.functions=[exact_match]", UNSAFE).reward)


ENVIRONMENTS = """
from lockstep.rollout.environments.declaration import Declaration

class Long:
    declaration = Declaration(max_turns=60)
    tools = ()
    def __init__(self, level: int = 1): self.level = int(level) + 1
    async def reset(self, example): ...
    async def step(self, message): ...

class Half:
    async def reset(self, example): ...

class Bare(Half):
    async def step(self, message): ...

class Later(Bare):
    @property
    def tools(self): return self._made_by_reset
"""


@pytest.mark.parametrize(
    ("name", "settings", "problem"),
    [
        ("Long", "{}", "Long declares max_turns=60, which is not read from a file; set environment.max_turns=60"),
        ("Long", "{level: high}", "with the settings {'level': 'high'} raised ValueError in line 7"),
        (
            "Long",
            "{levels: 1}",
            "'levels' (did you mean 'level'?); environment.settings are its arguments (level: int = 1)",
        ),
        ("Half", "{}", "environment Half has no method step, which the driver turn_by_turn calls"),
        ("Bare", "{}", "environment Bare has no attribute tools, which the model may call; write tools = ()"),
        ("mixed", "{}", "found environments=None, expected settings by name"),
        ("mixed", "{environments: [chain]}", "found environments=['chain'], expected settings by name"),
        ("mixed", "{environments: {chain: null}}", "set 'environment.settings.environments.chain={}'"),
        ("mixed", "{environments: {chain: {}}, default: [1]}", "default is [1], expected one of chain"),
        ("agent", "{agent: 3}", "found agent=3; set environment.settings.agent=path/to/file.py:function"),
    ],
)
def test_an_environment_that_cannot_be_made_ends_in_a_sentence(
    name: str, settings: str, problem: str, tmp_path: Path
) -> None:
    (tmp_path / "my_env.py").write_text(ENVIRONMENTS)
    named = f"{tmp_path}/my_env.py:{name}" if name[0].isupper() else name
    words = (f"environment.name={named}", f"environment.settings={settings}", "environment.max_turns=null")
    config = composed(*words)
    (found,) = environment_problems(config.environment, config.max_turns)
    assert problem in found


def test_tools_may_be_made_by_a_reset(tmp_path: Path) -> None:
    (tmp_path / "my_env.py").write_text(ENVIRONMENTS)
    config = composed(f"environment.name={tmp_path}/my_env.py:Later")
    assert list(environment_problems(config.environment, config.max_turns)) == []


def test_a_class_of_a_file_that_extends_one_of_ours_keeps_the_default_of_turns(tmp_path: Path) -> None:
    written = "from lockstep.rollout.environments.tools import ToolEnvironment\nclass Mine(ToolEnvironment): ...\n"
    (tmp_path / "mine.py").write_text(written)
    config = composed(f"environment.name={tmp_path}/mine.py:Mine")
    assert list(environment_problems(config.environment, config.max_turns)) == []
    assert config.max_turns == 3


OWN = """
import time

class Called:
    def __call__(self, rollout): return 1.0

def right(rollout): return 1.0

def _hidden(rollout): return 1.0

called = Called()
raise RuntimeError("the file is not run by the checks")
"""


@pytest.mark.parametrize("name", ["right", "called", "_hidden", "time"])
def test_a_name_of_a_reward_file_is_looked_up_without_running_it(name: str, tmp_path: Path):
    (tmp_path / "own.py").write_text(OWN)
    assert not list(reward_name_problems(composed(f"reward.functions=[{tmp_path}/own.py:{name}]").reward))


def test_a_missing_reward_function_is_found_by_the_checks_with_those_of_the_file(arguments, tmp_path: Path):
    (tmp_path / "own.py").write_text(OWN)
    with pytest.raises(ConfigError) as error:
        validate(composed(*arguments, f"reward.functions=[{tmp_path}/own.py:wrong]"))
    assert str(error.value) == f"reward.functions: {tmp_path}/own.py has no function 'wrong'; it has right"
    (tmp_path / "own.py").write_text("def broken(:\n")
    (problem,) = reward_name_problems(composed(f"reward.functions=[{tmp_path}/own.py:broken]").reward)
    assert problem.startswith(f"reward.functions: {tmp_path}/own.py cannot be loaded: SyntaxError in line 1: ")


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ("queries, prompts, labels", "that of OpenRLHF"),
        ("completion, answer", "that of verifiers"),
        ("text", "none of a"),
    ],
)
def test_a_signature_of_another_trainer_is_found_before_the_file_is_run(parameters: str, says: str, tmp_path: Path):
    (tmp_path / "own.py").write_text(f"def theirs({parameters}): ...\nraise RuntimeError('it is not run')\n")
    (problem,) = reward_name_problems(composed(f"reward.functions=[{tmp_path}/own.py:theirs]").reward)
    assert says in problem
    assert "write `def theirs(rollout)`" in problem


def test_environments_say_what_the_system_lacks(monkeypatch):
    alone = composed("environment=sandbox")
    among = composed("environment.name=mixed", "environment.settings.environments={chain: {}, sandbox: {}}")
    assert lacks(alone) == lacks(among) == []
    monkeypatch.setattr("lockstep.rollout.sandbox.sandbox.refusing_filter", lambda: bytes(8))
    for config in (alone, among):
        (problem,) = lacks(config)
        assert "did not isolate a program of the model" in problem
        assert "set environment.settings.unsafe=true" in problem


def test_settings_that_turn_the_isolation_off_are_named():
    sandbox = ("environment=sandbox", "+environment.settings.unsafe=true")
    assert unisolated(composed(CODE, UNSAFE)) == ["reward.settings.code_tests.unsafe"]
    assert unisolated(composed(*sandbox)) == ["environment.settings.unsafe"]
    mixed = "environment.settings.environments={sandbox: {unsafe: true}}"
    assert unisolated(composed("environment.name=mixed", mixed)) == ["environment.settings.unsafe"]
    assert unisolated(composed("environment=sandbox")) == []


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """Overrides of a training run that validates, with a data set and a model of its own."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "print 4", "question": "print 4", "answer": "4", "tests": ["assert True"]}\n')
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return [f"data.path={rows}", "data.heldout_path=null", f"model.path={model}", "environment=single_turn"]


def test_the_check_of_a_run_includes_the_sandbox(arguments, monkeypatch):
    monkeypatch.setattr(sandbox, "isolation_problem", lambda: None)
    validate(composed(*arguments, CODE))
    monkeypatch.setattr(sandbox, "isolation_problem", lambda: "no namespaces here")
    with pytest.raises(ConfigError, match="no namespaces here"):
        validate(composed(*arguments, CODE))
    validate(composed(*arguments, CODE), needs_data=False)
    validate(composed(*arguments, CODE, UNSAFE))
