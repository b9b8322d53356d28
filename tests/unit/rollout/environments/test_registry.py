"""Environments are found by name, and their classes say all that the rest of a run knows of them."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lockstep.rollout import environments
from lockstep.rollout.environments import (
    declaration,
    declared_parts,
    environment_class,
    environment_names,
    make_environment,
)
from lockstep.rollout.environments.declaration import Declaration
from lockstep.rollout.environments.drivers import turn_by_turn
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.sampler.sampler import Sampler
from lockstep.trainer.config.prepared import model_command
from lockstep.trainer.config.schema import Config
from lockstep.trainer.config.user_code import outside_of
from tests.fixtures.paths import ROOT
from tests.fixtures.policies import CHAT, Policy, sampling

CHESS = """
from contextlib import asynccontextmanager

from lockstep.rollout.environments.declaration import Declaration
from lockstep.rollout.environments.drivers import turn_by_turn
from lockstep.rollout.episode.environment import Step

opened = []


@asynccontextmanager
async def with_a_board(table, environments):
    opened.append([type(one).__name__ for one in environments])
    async with turn_by_turn(table, environments) as run:
        yield run
    opened.append("closed")


class Chess:
    declaration = Declaration(
        reads="seed", max_turns=60, opens="a chess program", is_deterministic=False, driver=with_a_board
    )
    tools = ()

    def __init__(self, level=1):
        self.level = level

    async def reset(self, example):
        return [{"role": "user", "content": f"game {example['seed']}"}]

    async def step(self, message):
        return Step(done=True, outcome={"environment_reward": self.level})


class Silent:
    tools, reset, step = (), Chess.reset, Chess.step


class Wrong(Chess):
    declaration = {"opens": "a chess program"}


class Locked(Chess):
    @asynccontextmanager
    async def closed(table, environments):
        raise OSError("the board is taken")
        yield

    declaration = Declaration(driver=closed)


def make_chess(**settings):
    return Chess(**settings)
"""

ENTRIES = {
    "chess": "lockstep_chess:Chess",
    "twice": "lockstep_chess:Chess",
    "broken": "lockstep_broken:Chess",
    "ends": "lockstep_ends:Chess",
    "silent": "lockstep_chess:Silent",
    "made": "lockstep_chess:make_chess",
    "wrong": "lockstep_chess:Wrong",
    "locked": "lockstep_chess:Locked",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed package with an environment, and others with broken ones."""
    (tmp_path / "lockstep_chess.py").write_text(CHESS)
    (tmp_path / "lockstep_broken.py").write_text("1 / 0\n")
    (tmp_path / "lockstep_ends.py").write_text("raise SystemExit('bye')\n")
    for name, entries in (
        ("one", "\n".join(f"{name} = {place}" for name, place in ENTRIES.items())),
        ("other", "twice = lockstep_chess:Chess\ntools = lockstep_chess:Chess"),
    ):
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[lockstep.environments]\n{entries}\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for module in ("lockstep_chess", "lockstep_broken", "lockstep_ends"):
        sys.modules.pop(module, None)


def test_each_module_declares_one_environment_of_its_name_at_most() -> None:
    for name, module in environments._modules().items():
        members = vars(importlib.import_module(module)).items()
        own = [key for key, value in members if getattr(value, "__module__", None) == module and _declares(value)]
        assert len(own) <= 1, f"{module}: {own}"
        assert (name in environment_names()) == bool(own)


def _declares(value: object) -> bool:
    return isinstance(value, type) and "declaration" in vars(value)


def test_a_known_environment_loads_no_other() -> None:
    program = (
        "import sys; from lockstep.rollout.environments import make_environment; make_environment('single_turn'); "
        "print(*(name for name in sys.modules if name.startswith('lockstep')))"
    )
    loaded = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    assert "lockstep.rollout.environments.single_turn" in loaded
    others = ("adapters.", "demo.", "hosts", "tool_servers", "agent", "sandbox", "search")
    assert not [name for name in loaded if name.startswith(tuple(f"lockstep.rollout.environments.{o}" for o in others))]
    assert "lockstep.integrations.gateway.server" not in loaded


async def test_an_environment_of_a_package_is_known_by_its_declaration_alone(package: Path) -> None:
    assert "chess" in environment_names()
    config = Config()
    config.environment.name, config.environment.settings = "chess", {"level": 2}
    assert config.max_turns == 60
    assert any("a chess program, of environment chess" in one for one in outside_of(config))
    sampler = Sampler(
        engine=Policy(lambda prompt: "e4"),
        chat=CHAT,
        make_environment=partial(make_environment, "mixed", environments={"chess": {"level": 2}, "single_turn": {}}),
        max_turns=config.max_turns,
        seed=0,
    )
    rows = [{"seed": 7, "environment": "chess"}, {"prompt": "hi", "environment": "single_turn"}]
    rollouts = await sampler.collect(rows, samples_per_prompt=2, sampling=sampling(), step=0)
    assert [rollout.error for rollout in rollouts] == [None] * 4
    assert [rollout.outcome.get("environment_reward") for rollout in rollouts] == [2, 2, None, None]
    assert sys.modules["lockstep_chess"].opened == [["Chess"], "closed"]


def test_a_name_that_two_register_is_refused(package: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"'twice' is registered by .*:Chess of package one.* and .* of package other; un"
    ):
        environment_class("twice")
    with pytest.raises(
        ConfigError, match=r"'tools' .*:Chess of package other; uninstall these packages, as Lockstep has"
    ):
        make_environment("tools")


def test_a_package_that_cannot_be_imported_is_named(package: Path) -> None:
    with pytest.raises(ConfigError, match=r"'broken' .* from lockstep_broken:Chess of package one: ZeroDivisionError"):
        make_environment("broken")
    with pytest.raises(ConfigError, match=r"'ends' .* from lockstep_ends:Chess of package one: SystemExit: bye"):
        make_environment("ends")
    with pytest.raises(ConfigError, match=r"unknown environment 'ches'; expected one of .*chess"):
        make_environment("ches")


@pytest.mark.parametrize("name", ["silent", "made"])
def test_a_package_must_declare_what_its_environment_opens(package: Path, name: str) -> None:
    config = Config()
    config.environment.name = name
    with pytest.raises(ConfigError, match=f"'{name}' is lockstep_chess:.* of package one, which declares nothing; exp"):
        outside_of(config)


@pytest.mark.parametrize(
    "traits",
    [{"reads": "sed"}, {"max_turns": "60"}, {"max_turns": 0}, {"opens": None}, {"is_deterministic": 0}, {"driver": 1}],
    ids=str,
)
def test_a_trait_of_another_type_is_refused(traits: dict[str, Any], package: Path) -> None:
    with pytest.raises(ConfigError, match=r"found Declaration\(.*\), expected "):
        Declaration(**traits)
    with pytest.raises(ConfigError, match=r"found Wrong\.declaration of type dict, expected declaration = Declaration"):
        declaration("wrong")


async def test_a_driver_that_does_not_open_is_named(package: Path) -> None:
    make = partial(make_environment, "locked")
    sampler = Sampler(engine=Policy(lambda prompt: ""), chat=CHAT, make_environment=make, max_turns=1, seed=0)
    with pytest.raises(ConfigError, match=r"driver of environment Locked did not open: OSError.* the board is taken"):
        await sampler.collect([{"seed": 7}], samples_per_prompt=1, sampling=sampling(), step=0)


def test_a_model_is_not_looked_up_among_packages(package: Path) -> None:
    assert model_command("models/twice") is model_command("models/broken") is None
    assert model_command("models/chain") == "lockstep make-demo-model --task chain"


def test_packages_are_read_once_for_all_episodes(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_environment("chess")
    monkeypatch.setattr(environments, "entry_points", lambda **group: pytest.fail("they were read again"))
    make_environment("chess")


def test_a_mixture_has_the_turns_of_its_longest_part(package: Path) -> None:
    config = Config()
    config.environment.name = "mixed"
    inner = {"environments": {"chess": {}, "single_turn": {}}}
    config.environment.settings = {"environments": {"mixed": inner, "calculator": {}}}
    assert config.max_turns == 60
    config.environment.max_turns = 2
    assert config.max_turns == 2


def test_the_parts_of_mixtures_are_declared_at_any_depth() -> None:
    settings = {"a": 1, "environments": {"mixed": {"environments": {"mcp": {"b": 2}}}, "tools": {}, "x.py:Y": None}}
    parts = [(name, own, one.opens) for name, own, one in declared_parts("mixed", settings)]
    assert parts[0] == ("mixed", settings, "")
    assert parts[2:] == [("mcp", {"a": 1, "b": 2}, "tool servers"), ("tools", {"a": 1}, ""), ("x.py:Y", None, "")]


def test_a_file_of_a_user_is_not_read_for_its_declaration(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit\n")
    assert declaration(f"{tmp_path}/mine.py:Mine") == Declaration()


@pytest.mark.parametrize(
    ("name", "is_known"), [("tools", True), ("openenv", False), ("trl_rollout", False), ("verifiers", False)]
)
def test_a_row_is_measured_only_where_its_prompt_is_known(name: str, is_known: bool) -> None:
    assert declaration(name).has_prompt is is_known
    assert (declaration(name).driver is turn_by_turn) is (name not in ("trl_rollout", "verifiers"))


def named_environments(source: str, names: set[str]) -> list[str]:
    """Return collections of two environments' names, and comparisons of a setting with one."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts) | ast.Dict(keys=parts):
                texts = [part.value for part in parts if isinstance(part, ast.Constant)]
                is_listed = len(names.intersection(text for text in texts if isinstance(text, str))) >= 2
            case ast.Compare(left=left, comparators=right):
                sides = [ast.unparse(side) for side in (left, *right)]
                is_listed = any("environment" in side for side in sides) and any(
                    isinstance(side, ast.Constant) and side.value in names for side in (left, *right)
                )
            case _:
                is_listed = False
        if is_listed:
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def test_no_other_place_lists_environments_by_name() -> None:
    names = set(environment_names())
    assert named_environments('A = ("mcp", "openenv")', names)
    assert named_environments('x = config.environment.name == "verifiers"', names)
    listed = {
        str(file.relative_to(ROOT)): found
        for package in ("lab", "trainer", "rollout", "rewards", "scripts")
        for file in (ROOT / package).rglob("*.py")
        if "environments" not in file.parts and (found := named_environments(file.read_text(), names))
    }
    assert listed == {}, "ask the declaration (lockstep/rollout/environments/declaration.py)"
