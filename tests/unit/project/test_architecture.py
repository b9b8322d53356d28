"""The layers of the library: imports point down, never in a circle, and folders stay small.

`scripts/project/imports.py` says which imports are seen.
"""

from __future__ import annotations

import graphlib
from collections import defaultdict
from pathlib import Path

import pytest

from scripts.project.imports import Imports, imported_names, read_imports, read_sources
from scripts.project.map_code import LIBRARY, ROOMS
from tests.fixtures.paths import ROOT

OTHERS = ("lockstep.demo", "scripts", "benchmarks", "examples", "tests", *LIBRARY)
"""Packages that no module of the library imports: programs around it, and its own packages by their short names."""

MAX_MODULES = 12
REPEATED = {
    "algorithm.py": "config/ has the settings, checks/ their conflicts",
    "correction.py": "checks/ checks its settings, objective/ computes it",
    "critic.py": "model/ has the network, advantages/ what it is for",
    "data.py": "checks/ checks its settings, reward_model/ reads comparisons",
    "errors.py": "rollout/ has those of the library, gateway/ those that its clients get",
    "inputs.py": "losses/ has those of a loss, advantages/ those of an advantage",
    "messages.py": "chat/ prepares them for templates, gateway/ validates those of a request",
    "pool.py": "workers/ has processes, engine/ has engines",
    "sandbox.py": "sandbox/ has the walls, environments/ the tools behind them",
    "scorer.py": "score/ scores a step, diagnosis/ both sides of a comparison",
    "source.py": "weights/ has the sender of weights, collect/ that of rollouts",
    "step.py": "trainer/ has the training step, diagnosis/ the diagnosis of one",
    "tool_calls.py": "chat/ parses them, functions/ rewards them",
    "trl.py": "rewards/ adapts TRL's reward functions, environments/ its environments",
    "worker.py": "workers/ runs reward functions, gloo/ receives weights",
}
"""Base names that several modules have, and how their folders tell them apart."""


def library_imports(root: Path) -> Imports:
    """Imports between the modules of the library."""
    return read_imports(read_sources(root, LIBRARY))


def room_of(module: str) -> str:
    return "/".join(module.split("/")[:2])


def unknown_rooms(imports: Imports, rooms: tuple[str, ...]) -> set[str]:
    """Rooms without a place in the order, and places without a room."""
    return {room_of(module) for module in imports} ^ set(rooms)


def upward_imports(imports: Imports, rooms: tuple[str, ...]) -> list[str]:
    """Imports of a higher room, as `importer -> imported`."""
    place = {room: number for number, room in enumerate(rooms)}  # 0 is the highest
    return [
        f"{importer} -> {module}"
        for importer, modules in imports.items()
        for module in sorted(modules)
        if place[room_of(module)] < place[room_of(importer)]
    ]


def circle(imports: Imports) -> list[str]:
    """One circle of modules that import each other; empty if there is none."""
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def folder_sizes(imports: Imports) -> dict[str, int]:
    """Number of modules in each folder, `__init__` not counted."""
    sizes: dict[str, int] = defaultdict(int)
    for module in imports:
        folder, _, name = module.rpartition("/")
        sizes[folder] += name != "__init__.py"
    return sizes


def repeated_names(imports: Imports) -> set[str]:
    names = [name for module in imports if (name := module.rpartition("/")[2]) != "__init__.py"]
    return {name for name in names if names.count(name) > 1}


@pytest.fixture(scope="module")
def imports() -> Imports:
    return library_imports(ROOT)


def test_every_room_has_its_place_in_the_order(imports: Imports) -> None:
    assert unknown_rooms(imports, ROOMS) == set(), "ROOMS in scripts/project/map_code.py lists the rooms of the library"


def test_no_room_imports_a_higher_one(imports: Imports) -> None:
    assert upward_imports(imports, ROOMS) == []


def test_no_modules_import_each_other_in_a_circle(imports: Imports) -> None:
    assert circle(imports) == []


def test_no_folder_has_more_than_a_dozen_modules(imports: Imports) -> None:
    sizes = folder_sizes(imports)
    assert {folder: n for folder, n in sizes.items() if n > MAX_MODULES} == {}


def test_no_two_modules_have_the_same_name_unless_their_folders_tell_them_apart(imports: Imports) -> None:
    assert repeated_names(imports) - REPEATED.keys() == set()


def test_the_library_imports_nothing_of_the_programs_around_it() -> None:
    found = [
        f"{path} -> {name}"
        for path, source in read_sources(ROOT, LIBRARY).items()
        for name in imported_names(source)
        if name.startswith(OTHERS)
    ]
    assert found == []


# The checks find faults: one small library for each.

ORDER = ("trainer/high", "trainer/low", "rollout/records.py")


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A library without a fault."""
    for file, source in {
        "trainer/__init__.py": "",
        "trainer/high/__init__.py": "import json",
        "trainer/high/a.py": "from lockstep.trainer.low.c import d\nfrom lockstep.trainer.high import b",
        "trainer/high/b.py": "import lockstep.rollout.records",
        "trainer/low/c.py": "import torch\nfrom lockstep.rollout import records",
        "rollout/records.py": "import json",
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(source)
    return tmp_path


def test_a_library_without_a_fault_passes(library: Path) -> None:
    found = library_imports(library)
    assert found["trainer/high/a.py"] == {"trainer/low/c.py", "trainer/high/b.py"}
    assert found["trainer/low/c.py"] == {"rollout/records.py"}
    assert unknown_rooms(found, ORDER) == set()
    assert upward_imports(found, ORDER) == circle(found) == []


UPWARD = [
    "from lockstep.trainer.high.b import x",
    "from lockstep.trainer.high import b",
    "import lockstep.trainer.high.b as other",
    "def late():\n    from lockstep.trainer.high.b import x",
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from lockstep.trainer.high.b import x",
]


@pytest.mark.parametrize("source", UPWARD)
def test_an_import_of_a_higher_room_is_found(library: Path, source: str) -> None:
    (library / "trainer/low/c.py").write_text(source)
    assert upward_imports(library_imports(library), ORDER) == ["trainer/low/c.py -> trainer/high/b.py"]


def test_a_circle_within_a_room_is_found(library: Path) -> None:
    (library / "trainer/high/b.py").write_text("def late():\n    from lockstep.trainer.high.a import x")
    assert set(circle(library_imports(library))) == {"trainer/high/a.py", "trainer/high/b.py"}


@pytest.mark.parametrize("file", ["trainer/new/e.py", "trainer/new.py"])
def test_a_room_without_a_place_is_found(library: Path, file: str) -> None:
    (library / file).parent.mkdir(exist_ok=True)
    (library / file).write_text("import json")
    assert unknown_rooms(library_imports(library), ORDER) == {"trainer/new" if "e.py" in file else file}


def test_a_thirteenth_module_and_a_second_name_are_counted(library: Path) -> None:
    for number in range(12):
        (library / f"trainer/low/m{number}.py").write_text("import json")
    assert folder_sizes(library_imports(library))["trainer/low"] == MAX_MODULES + 1
    (library / "trainer/low/b.py").write_text("import json")
    assert repeated_names(library_imports(library)) == {"b.py"}


@pytest.mark.parametrize("guest", ["lab", "integrations"])
def test_the_core_imports_no_guest_and_guests_do_not_know_each_other(imports: Imports, guest: str) -> None:
    """They attach by names and entry points: a run loads them when it needs them, a reader of training meets none."""
    importers = [
        importer for importer, modules in imports.items() if any(one.startswith(f"{guest}/") for one in modules)
    ]
    assert {importer.split("/")[0] for importer in importers} == {guest}
