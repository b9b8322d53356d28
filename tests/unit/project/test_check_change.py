"""`make check` chooses the unit tests that depend on a change, nearest first, and says what it leaves out."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts.project import check_change
from scripts.project.check_change import FOLDERS, FOR_ALL, changed_files, choose, describe
from scripts.project.imports import read_sources
from tests.fixtures.paths import ROOT

UNIT = "tests/unit/trainer"
SOURCES = {
    "trainer/base.py": "import json",
    "trainer/middle.py": "def late():\n    from lockstep.trainer.base import x",
    "trainer/top.py": "from lockstep.trainer import middle",
    "trainer/alone.py": "WORKER = 'w'",
    "trainer/by_name.py": 'MODULE = "lockstep.trainer.alone"',
    "scripts/plugin.py": "import time",
    f"{UNIT}/test_plugin.py": 'PLUGIN = "scripts.plugin"',
    "trainer/reader.py": 'FILE = "numbers.json"',
    "trainer/losses/__init__.py": "import_all(__name__, __path__)",
    "trainer/losses/one.py": "import torch",
    "trainer/places/__init__.py": "for module in pkgutil.iter_modules(PLACES): ...",
    "trainer/places/own/two.py": "import torch",
    "scripts/start.py": "import sys",
    "tests/unit/conftest.py": "import tests.fixtures.shared",
    "tests/fixtures/shared.py": "import json",
    f"{UNIT}/test_base.py": "from lockstep.trainer.middle import y\n\ndef test_a(): ...\n\ndef test_b(): ...",
    f"{UNIT}/test_middle.py": "from lockstep.trainer.middle import y\n\ndef test_c(): ...",
    f"{UNIT}/test_top.py": "import lockstep.trainer.top\n\nclass TestTop:\n    async def test_d(self): ...",
    f"{UNIT}/test_by_name.py": "from lockstep.trainer.by_name import MODULE",
    f"{UNIT}/test_reader.py": "from lockstep.trainer.reader import FILE",
    f"{UNIT}/test_losses.py": "from lockstep.trainer.losses import z",
    f"{UNIT}/test_places.py": "from lockstep.trainer.places import find",
    f"{UNIT}/test_configs.py": 'FILES = "configs/x.yaml"',
    f"{UNIT}/test_start.py": 'COMMAND = ["scripts/start.py"]',
    "tests/integration/test_run.py": "import lockstep.trainer.base",
}


def chosen(*changed: str, limit: int = 100) -> list[str]:
    """Names of the files of tests that are run."""
    return [Path(file).name for file in choose(changed, SOURCES, limit).run]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ("trainer/base.py", ["test_base.py", "test_middle.py", "test_top.py"]),  # its own first, then by distance
        ("trainer/top.py", ["test_top.py"]),
        ("trainer/alone.py", ["test_by_name.py"]),
        ("scripts/plugin.py", ["test_plugin.py"]),
        ("trainer/losses/one.py", ["test_losses.py"]),
        ("trainer/places/own/two.py", ["test_places.py"]),
        ("trainer/numbers.json", ["test_reader.py"]),
        ("configs/other/y.yaml", ["test_configs.py"]),
        ("scripts/start.py", ["test_start.py"]),
        (f"{UNIT}/test_top.py", ["test_top.py"]),
        ("tests/integration/test_run.py", []),
        ("LICENSE", []),
    ],
)
def test_the_tests_that_depend_on_a_file_are_chosen(changed: str, expected: list[str]) -> None:
    choice = choose([changed], SOURCES, 100)
    assert [Path(file).name for file in choice.run] == expected
    assert choice.untested == (() if expected else (changed,))


@pytest.mark.parametrize("changed", ["tests/unit/conftest.py", "tests/fixtures/shared.py"])
def test_every_test_below_a_conftest_depends_on_it_and_its_imports(changed: str) -> None:
    assert len(chosen(changed)) == sum(map(check_change.is_unit_test, SOURCES))


def test_of_equal_distance_the_test_that_imports_fewest_modules_comes_first() -> None:
    wide = {f"{UNIT}/test_all.py": "import lockstep.trainer.middle, lockstep.trainer.alone"}
    run = choose(["trainer/middle.py"], SOURCES | wide, 100).run
    assert [Path(file).name for file in run] == ["test_middle.py", "test_base.py", "test_all.py", "test_top.py"]


def test_what_a_limit_leaves_out_is_counted() -> None:
    choice = choose(["trainer/base.py"], SOURCES, 1)
    assert choice.run == (f"{UNIT}/test_base.py",)
    assert choice.left_out == (f"{UNIT}/test_middle.py", f"{UNIT}/test_top.py")
    assert describe(["trainer/base.py"], choice, SOURCES).splitlines() == [
        "unit tests: 2 in 1 file depend on the change and run, of 4 in 10 files",
        "left out: 2 in 2 files depend on it, too, over 2 imports or more; to run them: make check FILES=3",
        "integration and long tests are left to `make test` and `make test-long`",
    ]


def test_files_without_a_test_and_files_for_all_tests_are_named() -> None:
    changed = ["LICENSE", "pyproject.toml"]
    text = describe(changed, choose(changed, SOURCES, 9), SOURCES)
    assert "no unit test depends on: LICENSE, pyproject.toml" in text
    assert "run `make test`, as every test depends on: pyproject.toml" in text
    assert all((ROOT / file).exists() for file in FOR_ALL)


def test_tests_of_a_deleted_module_are_chosen() -> None:
    sources = SOURCES | {"trainer/base.py": "", f"{UNIT}/test_middle.py": ""}
    run = choose(["trainer/base.py", f"{UNIT}/test_middle.py"], sources, 9).run
    assert run == (f"{UNIT}/test_base.py", f"{UNIT}/test_top.py")


def test_a_change_of_the_correction_weights_chooses_their_test_first() -> None:
    choice = choose(["trainer/objective/correction/weights.py"], read_sources(ROOT, FOLDERS), 3)
    assert choice.run[0] == "tests/unit/trainer/objective/correction/test_weights.py"
    assert choice.left_out


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one commit on main, and another on a branch."""
    for words in (
        ["init", "--quiet", "--initial-branch=main"],
        ["config", "user.name", "a"],
        ["config", "user.email", "a"],
    ):
        git(tmp_path, *words)
    for name in ("edited.py", "deleted.py", "same.py"):
        (tmp_path / name).write_text("x = 1")
    commit(tmp_path)
    git(tmp_path, "checkout", "--quiet", "-b", "branch")
    (tmp_path / "committed.py").write_text("x = 1")
    commit(tmp_path)
    return tmp_path


def git(repository: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=repository, check=True, capture_output=True, text=True).stdout.strip()


def commit(repository: Path) -> None:
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "--message", "x")


def test_changed_files_are_committed_edited_deleted_and_untracked_ones(repository: Path) -> None:
    (repository / "edited.py").write_text("x = 2")
    (repository / "deleted.py").unlink()
    (repository / "with space é.py").write_text("x = 1")
    changed = ["committed.py", "deleted.py", "edited.py", "with space é.py"]
    assert changed_files(repository, None) == (git(repository, "rev-parse", "main"), changed)
    assert changed_files(repository, "HEAD")[1] == changed[1:]


def test_the_base_is_where_the_branch_left_the_remote(repository: Path) -> None:
    git(repository, "update-ref", "refs/remotes/origin/main", "HEAD")
    assert changed_files(repository, None) == (git(repository, "rev-parse", "HEAD"), [])


def test_a_base_that_is_not_a_commit_is_refused(repository: Path) -> None:
    with pytest.raises(ValueError, match=r"absent.*make check BASE=HEAD~1"):
        changed_files(repository, "absent")


def test_only_the_packages_are_typed_and_only_files_that_are_there_are_read() -> None:
    choice = choose(["trainer/step.py"], SOURCES, 9)
    lines = [
        " ".join(words)
        for words in check_change.commands(["trainer/step.py", "scripts/project/lock.py", "gone.py"], choice, 0)
    ]
    assert next(line for line in lines if "pyright" in line).endswith(" trainer/step.py")
    assert next(line for line in lines if "check_prose" in line).endswith(" trainer/step.py scripts/project/lock.py")
    assert not any("pytest" in line or "hadolint" in line for line in lines)


@pytest.mark.long
@pytest.mark.parametrize(("left_s", "outcome"), [(-1, "2 skipped"), (600, "2 passed")])
def test_tests_that_no_time_is_left_for_are_skipped_and_counted(tmp_path: Path, left_s: float, outcome: str) -> None:
    (tmp_path / "test_two.py").write_text("def test_a(): ...\n\ndef test_b(): ...")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-ra",
        "-n",
        "2",
        "-p",
        "no:cacheprovider",
        "-p",
        "scripts.project.deadline",
    ]
    finished = subprocess.run(
        [*command, "--deadline", str(time.monotonic() + left_s), "test_two.py"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert outcome in finished.stdout
    assert ("[2]" in finished.stdout and "make check CHECK_SECONDS=600" in finished.stdout) == (left_s < 0)
