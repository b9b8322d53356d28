"""Try the newest version of every dependency, and print what breaks: package, locked, newest, verdict.

    make newest      # in .venv-newest, or NEWEST_VENV=/path; needs uv and the package index

First the newest versions that the bounds of pyproject.toml and of the packages allow, all at once. If a check fails,
each package that is newer than its lock goes back alone; the one without which the checks pass is named. Then the
newest version of each direct dependency that a bound excludes, alone, to see which bounds can be raised.

Exit status: 1 if an allowed version breaks a check. Not tried: torch, against which vLLM's kernels are built.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from scripts.project.lock import FOLDER, NOT_FOR_CPU, ROOT, TORCH_CPU_REQUIRES, locked, project, versions

IMPORT_ALL = """
import importlib, pathlib, sys
failed = []
for folder in ("rollout", "rewards", "trainer", "lab", "integrations"):
    for file in sorted(pathlib.Path(folder).rglob("*.py")):
        if "hosts" in file.parts or file.name in ("__main__.py", "jail.py"):
            continue  # programs of other processes
        name = ".".join(("lockstep", *file.with_suffix("").parts)).removesuffix(".__init__")
        try:
            importlib.import_module(name)
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {error}")
sys.exit("; ".join(failed[:3]) if failed else 0)
"""
TESTS = (
    "tests/unit/rollout/test_vllm_names.py",
    "tests/unit/rollout/chat",
    "tests/unit/rollout/weights/test_source.py",
    "tests/unit/trainer/model/test_lora.py",
)
CHECKS = {
    "imports": ("-c", IMPORT_ALL),
    "tests": ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow and not long", *TESTS),
}
"""Arguments of Python, by name; the names of vLLM are compared first, by the first of the tests."""


def uv(*arguments: str, lines: Iterable[str] = ()) -> str:
    command = ["uv", "pip", *arguments, "--quiet"]
    done = subprocess.run(command, input="\n".join(lines), stdout=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    if done.returncode:
        sys.exit(f"`{' '.join(command)}` failed; its message is above.")
    return done.stdout


def compiled(lines: Iterable[str], *options: str) -> dict[str, str]:
    """Return the newest versions that satisfy these requirements, by package."""
    plain = ("--no-header", "--no-annotate", "--python-version", "3.11")
    pins = re.findall(r"^([\w.-]+)==(\S+)", uv("compile", "-", *plain, *options, lines=lines), re.M)
    return {canonicalize_name(name): version for name, version in pins if canonicalize_name(name) not in NOT_FOR_CPU}


def install(python: str, pins: Mapping[str, str]) -> None:
    names = [f"{name}=={version}" for name, version in pins.items()]
    uv("install", "--python", python, "--no-deps", "--no-build-isolation", *names)


def failure(python: str) -> str | None:
    """Return the first check that fails, with its message in one line; None if all pass."""
    for name, arguments in CHECKS.items():
        done = subprocess.run([python, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
            errors = [line for line in lines if re.match(r"E   +\S|FAILED|ERROR|lockstep\.", line)] or lines
            return f"{name}: {' '.join(errors[-1].split())[:160]}"
    return None


def bounds(python: str, package: str, version: str) -> str:
    """Return what excludes a version, among pyproject.toml and the installed packages."""
    code = (
        "import importlib.metadata as m\nfor d in m.distributions():\n for r in d.requires or ():\n  print(d.name, r)"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    pairs = [line.partition(" ")[::2] for line in done.stdout.splitlines()]
    holding = set()
    for owner, text in pairs:
        requirement = Requirement(text)
        is_other = canonicalize_name(requirement.name) != package
        if is_other or requirement.specifier.contains(version, prereleases=True):
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}) or owner == "lockstep-rl":
            holding.add(f"{owner} wants {requirement.specifier}")
    return ", ".join(sorted(holding))


def rows(python: str) -> list[tuple[str, str, str, str]]:
    """Install, check, and return the table."""
    extras = project()["project"]["optional-dependencies"]
    direct = [*project()["project"]["dependencies"], *extras["cpu"], *extras["test"]]
    names = {canonicalize_name(Requirement(text).name) for text in direct} - set(NOT_FOR_CPU)
    lock = {name: pins[0] for name, pins in versions(locked(FOLDER / "cpu.txt")).items()}
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as excludes:
        excludes.write("\n".join(NOT_FOR_CPU))
        excludes.flush()
        with_bounds = ("--excludes", excludes.name, "--constraint", "requirements/constraints.in")
        allowed = compiled([*direct, *TORCH_CPU_REQUIRES], *with_bounds)
    newest = compiled(names, "--no-deps")
    changed = {name: version for name, version in allowed.items() if lock.get(name) != version}
    if (already := failure(python)) is not None:
        sys.exit(f"the checks fail with the locked versions: {already}")
    install(python, changed)
    broken = failure(python)
    culprits = {}
    for name in changed if broken else ():
        if name in lock:
            install(python, {name: lock[name]})
            if failure(python) is None:
                culprits[name] = broken
            install(python, {name: changed[name]})
    together = "works" if broken is None else "unclear, because all together fail"
    table = []
    for name, version in changed.items():
        is_older = name in lock and Version(version) < Version(lock[name])
        verdict = culprits.get(name) or together + (
            ", older than the lock: a newer package excludes that" if is_older else ""
        )
        table.append((name, lock.get(name, "–"), version, verdict))
    for name in sorted(names):
        if newest[name] == allowed[name]:
            continue
        install(python, {name: newest[name]})
        verdict = failure(python) or "works, and a bound can be raised"
        install(python, {name: allowed[name]})
        table.append((name, lock[name], newest[name], f"{verdict} ({bounds(python, name, newest[name])})"))
    return [*table, ("all together", "", "", broken or "works")]


def main(arguments: Sequence[str]) -> int:
    (python,) = arguments
    table = [("package", "locked", "newest", "verdict"), *rows(python)]
    widths = [max(len(row[column]) for row in table) for column in range(3)]
    for row in table:
        print("  ".join([*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[3]]))
    return int(table[-1][3] != "works")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
