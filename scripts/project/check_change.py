"""Check a change while it is edited: style, English and types of its files, and the unit tests that depend on them.

    python -m scripts.project.check_change                # also: make check
    python -m scripts.project.check_change --base HEAD~3  # what changed since then; default: since main
    python -m scripts.project.check_change --files 200 --seconds 600  # up to this number of test files and time

A test depends on a change if its module imports a changed module, itself or through others. Tests of a changed module
by name (`test_<module>.py`) and changed tests come first, then those with the fewest imports between. A changed file
that is not a module counts as read by each module that names it (`named_by`).

Not covered: integration and long tests, which `make test` and `make test-long` run; tests that start a changed program
without naming its file; what `scripts/project/imports.py` does not see.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.project.generated import ROOT
from scripts.project.imports import Imports, module_of, read_imports, read_sources
from scripts.project.map_code import LIBRARY, PACKAGES

FOLDERS = (*PACKAGES, "benchmarks", "examples", "tests")
"""Where modules are."""
FOR_ALL = ("pyproject.toml", "requirements/", "lockstep/__init__.py")
"""Files on which every test depends without an import: packages, settings of pytest, and the importable name."""
MAX_FILES = 30
"""Files of tests that two cores run within about a minute; importing torch takes the first seconds."""
MAX_SECONDS = 80
"""After these no test begins, nearest tests run first: some files and busy machines take longer."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Files of unit tests that depend on a change, nearest first."""

    run: tuple[str, ...]
    left_out: tuple[str, ...]
    distances: Mapping[str, int]
    """From each module that depends on the change to the number of imports between, 0 for a changed one."""
    untested: tuple[str, ...]
    """Changed files that no unit test depends on."""


def changed_files(root: Path, base: str | None) -> tuple[str, list[str]]:
    """Return the commit to compare with, and the files that differ from it: committed, edited, deleted and untracked.

    base: a commit; None: where HEAD left origin/main, or main without a remote.

    Raises:
        ValueError: git knows no such commit.
    """

    def git(*words: str) -> str:
        result = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
        if result.returncode:
            raise ValueError(f"git {' '.join(words)}: {result.stderr.strip()}; name a commit: make check BASE=HEAD~1")
        return result.stdout.strip()

    if base is None:
        has_remote = git("for-each-ref", "refs/remotes/origin/main")
        base = git("merge-base", "HEAD", "origin/main" if has_remote else "main")
    commit = git("rev-parse", "--verify", f"{base}^{{commit}}")
    outputs = (
        git("diff", "--name-only", "--no-renames", "-z", commit),
        git("ls-files", "--others", "--exclude-standard", "-z"),
    )
    return commit, sorted({file for files in outputs for file in files.split("\0") if file})


def is_unit_test(path: str) -> bool:
    return path.startswith("tests/unit/") and Path(path).name.startswith("test_") and path.endswith(".py")


def read_dependencies(sources: Mapping[str, str]) -> Imports:
    """Return the modules that each module needs: its imports, and what Lockstep and pytest load without an import."""
    needs = read_imports(sources)
    for path, source in sources.items():
        names = re.findall(r'"((?:lockstep|scripts|tests)\.[\w.]+)"', source)  # loaded by name
        needs[path] |= {module for name in names if (module := module_of(name, sources))} - {path}
        if path.endswith("/__init__.py") and re.search(r"\bimport_all\(|\biter_modules\(", source):  # a registry
            needs[path] |= {other for other in sources if other.startswith(f"{Path(path).parent}/")} - {path}
        if is_unit_test(path):
            needs[path] |= {conftest for each in Path(path).parents if (conftest := f"{each}/conftest.py") in sources}
    return needs


def named_by(file: str, sources: Mapping[str, str]) -> set[str]:
    """Return the modules that name a file in quotes: by its path, its name, or a folder.

    A file in docs/, configs/ or another folder without modules: also by that folder, as tests read it as a whole. A
    file beside modules: if no module names it, by the folder that it is in.
    """
    path = Path(file)

    def naming(*words: str) -> set[str]:
        pattern = re.compile("|".join(words))
        return {module for module, source in sources.items() if module != file and pattern.search(source)}

    own = [rf'[/"]{re.escape(file)}\b']
    if path.stem != "__init__" and (path.suffix or len(path.parts) == 1):  # names like `run` are too common
        own.append(rf'"{re.escape(path.name)}"')
    if len(path.parts) == 1 or path.suffix == ".py":
        return naming(*own)
    if path.parts[0] in FOLDERS:
        return naming(*own) or naming(rf'"{re.escape(path.parts[-2])}"')
    return naming(*own, rf'"{re.escape(path.parts[0])}["/]')


def distances(changed: Iterable[str], needs: Imports) -> dict[str, int]:
    """Return the modules that depend on these, with the number of imports between; 0 for the modules themselves."""
    distance_of = {module: 0 for module in changed if module in needs}
    frontier, distance = set(distance_of), 0
    while frontier:
        distance += 1
        frontier = {module for module, others in needs.items() if others & frontier} - distance_of.keys()
        distance_of |= dict.fromkeys(frontier, distance)
    return distance_of


def seeds(file: str, sources: Mapping[str, str]) -> set[str]:
    """Return the modules from which the dependents of a changed file are counted: itself, its test, its readers."""
    path = Path(file)
    if path.suffix != ".py":
        return named_by(file, sources)
    test_file = f"tests/unit/{path.parent}/test_{path.stem}.py"
    read = set() if path.parts[0] in LIBRARY or is_unit_test(file) else named_by(file, sources)  # scripts are started
    return {file, test_file, *read} & sources.keys()


def choose(changed: Iterable[str], sources: Mapping[str, str], limit: int) -> Choice:
    """Choose the files of unit tests that depend on changed files, at most `limit`, nearest first.

    sources: of all modules, empty for deleted ones. Of equal distance, tests that import the fewest modules come first:
    those are about the changed module, others are about many.
    """
    needs = read_dependencies(sources)
    distance_of: dict[str, int] = {}
    untested_files = []
    for file in changed:
        from_file = distances(seeds(file, sources), needs)
        if not any(map(is_unit_test, from_file)):
            untested_files.append(file)
        for module, distance in from_file.items():
            distance_of[module] = min(distance, distance_of.get(module, distance))
    tests = [module for module in distance_of if is_unit_test(module) and sources[module]]
    tests.sort(key=lambda test: (distance_of[test], len(needs[test]), test))
    return Choice(
        run=tuple(tests[:limit]), left_out=tuple(tests[limit:]), distances=distance_of, untested=tuple(untested_files)
    )


def count_tests(files: Iterable[str], sources: Mapping[str, str]) -> int:
    """Return the number of test functions, each counted once for all of its parameters."""
    nodes = [node for file in files for node in ast.walk(ast.parse(sources[file]))]
    return sum(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name[:5] == "test_" for node in nodes)


def describe(changed: Iterable[str], choice: Choice, sources: Mapping[str, str]) -> str:
    """Return in lines which tests are run and which are left out, in numbers."""
    tests = [module for module in sources if is_unit_test(module)]

    def size(files: Collection[str]) -> str:
        return f"{count_tests(files, sources):,} in {len(files)} file{'s' * (len(files) != 1)}"

    def names(files: Sequence[str]) -> str:
        return ", ".join(files[:5]) + (f", and {len(files) - 5} more" if files[5:] else "")

    lines = [f"unit tests: {size(choice.run)} depend on the change and run, of {size(tests)}"]
    if choice.left_out:
        nearest = choice.distances[choice.left_out[0]]
        lines.append(
            f"left out: {size(choice.left_out)} depend on it, too, over {nearest} imports or more; "
            f"to run them: make check FILES={len(choice.run) + len(choice.left_out)}"
        )
    if choice.untested:
        lines.append(f"no unit test depends on: {names(choice.untested)}")
    if for_all := [file for file in changed if file.startswith(FOR_ALL)]:
        lines.append(f"run `make test`, as every test depends on: {names(for_all)}")
    return "\n".join([*lines, "integration and long tests are left to `make test` and `make test-long`"])


def commands(changed: Iterable[str], choice: Choice, deadline: float) -> list[list[str]]:
    """Return the command lines of the checks, quick ones first. deadline: of `scripts/project/deadline.py`."""
    programs = Path(sys.executable).parent
    there = [file for file in changed if (ROOT / file).is_file()]
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pyright"]["include"]
    typed_files = [file for file in there if file.endswith(".py") and Path(file).parts[0] in folders]
    workers = [] if len(choice.run) < 4 else ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
    until = ["-p", "scripts.project.deadline", "--deadline", str(deadline)]
    markers = ["-m", "not long and not slow and not gpu"]
    pytest = [sys.executable, "-m", "pytest", "-q", *markers, *until, *workers, *choice.run]
    return [
        [f"{programs}/ruff", "check", "."],
        [f"{programs}/ruff", "format", "--check", "."],
        *([[sys.executable, "scripts/project/check_prose.py", *there]] if there else []),
        *([[f"{programs}/hadolint", "Dockerfile"]] if "Dockerfile" in there else []),
        *([[f"{programs}/pyright", "--pythonpath", sys.executable, *typed_files]] if typed_files else []),
        *([pytest] if choice.run else []),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Check a change: its files, and the unit tests that depend on them.")
    parser.add_argument("--base", help="the commit to compare with; default: where the branch left main")
    parser.add_argument("--files", type=int, default=MAX_FILES, help="how many files of tests to run at most")
    parser.add_argument("--seconds", type=float, default=MAX_SECONDS, help="begin no test after this time")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    if arguments.files < 0:
        parser.error(f"--files {arguments.files}: expected a number of files, 0 or more")
    try:
        base, files = changed_files(ROOT, arguments.base)
    except ValueError as error:
        parser.error(str(error))
    print(f"files that differ from {base[:10]}: {len(files)}")
    if not files:
        print("there is nothing to check; compare with an earlier commit: make check BASE=HEAD~1")
        return 0
    deleted_files = {file: "" for file in files if file.endswith(".py") and not (ROOT / file).exists()}
    sources = read_sources(ROOT, FOLDERS) | deleted_files
    try:
        choice = choose(files, sources, arguments.files)
    except SyntaxError:  # ruff names file and line
        return subprocess.run([f"{Path(sys.executable).parent}/ruff", "check", "."], cwd=ROOT).returncode
    print(describe(files, choice, sources), flush=True)
    failures = []
    for command in commands(files, choice, deadline):
        name = next(Path(word).name for word in command if word not in (sys.executable, "-m"))
        print(f"-- {name}", flush=True)
        if subprocess.run(command, cwd=ROOT).returncode:
            failures.append(name)
    print(f"failed: {', '.join(failures)}" if failures else "no check failed")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
