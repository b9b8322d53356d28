"""The Dockerfile, checked as a linter would: there is no Docker where the tests run.

Rules by their names in hadolint where it has them. Each is shown to fail on a file that breaks it.
"""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fixtures.paths import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text()


@dataclass(frozen=True)
class Instruction:
    name: str
    arguments: str


def instructions(text: str) -> list[Instruction]:
    """Instructions with their continuation lines joined; comments are left out."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    found = [line.partition(" ") for line in joined.splitlines() if line.strip()]
    return [Instruction(name.upper(), rest.strip()) for name, _, rest in found]


def problems(text: str) -> set[str]:
    """Names of the rules that a Dockerfile breaks."""
    steps = instructions(text)
    by_name = {name: [s.arguments for s in steps if s.name == name] for name in {s.name for s in steps}}
    runs = by_name.get("RUN", [])
    found: set[str] = set()
    for base in by_name.get("FROM", []):
        image = base.split()[0]
        tag = image.rpartition(":")[2] if ":" in image else ""
        if "@sha256:" not in image and not re.search(r"\d+\.\d+", tag):
            found.add("base is pinned (DL3006, DL3007)")
    users = [step.arguments for step in steps if step.name == "USER"]
    if not users or users[-1].partition(":")[0] in ("root", "0"):
        found.add("last user is not root (DL3002)")
    if users and not users[-1].partition(":")[0].isdigit():
        found.add("user is a number, which Kubernetes can verify")
    for run in runs:
        if re.search(r"\bsudo\b", run):
            found.add("no sudo (DL3004)")
        if "apt-get install" in run:
            if "--no-install-recommends" not in run:
                found.add("no recommended packages (DL3015)")
            if "rm -rf /var/lib/apt/lists" not in run:
                found.add("no package lists stay (DL3009)")
            if " -y" not in run:
                found.add("apt-get asks nobody (DL3014)")
        if re.search(r"\bpip\b|install\.sh", run) and "--mount=type=cache" not in run:
            found.add("packages come through a cache mount")
        for mount in re.findall(r"--mount=type=cache,(\S+)", run):
            if users and "uid=" not in mount and steps.index(Instruction("RUN", run)) > _first(steps, "USER"):
                found.add("the user may write to the cache mount")
        if re.search(r"\|", run) and "pipefail" not in run:
            found.add("a pipe fails when its first command does (DL4006)")
    if by_name.get("ADD"):
        found.add("COPY and not ADD (DL3020)")
    if any(not path.startswith(("/", "$")) for path in by_name.get("WORKDIR", [])):
        found.add("WORKDIR is absolute (DL3000)")
    if any("--chown=" not in copy for copy in by_name.get("COPY", [])):
        found.add("copied files belong to the user")
    for name in ("ENTRYPOINT", "CMD"):
        for arguments in by_name.get(name, []):
            if not _is_exec_form(arguments):
                found.add("exec form, so that signals arrive (DL3025)")
        if len(by_name.get(name, [])) > 1:
            found.add("one ENTRYPOINT and one CMD (DL4003, DL4004)")
    if not by_name.get("ENTRYPOINT"):
        found.add("there is an entry point")
    if re.search(
        r"(?i)(password|secret|token|api_?key)\s*=", " ".join(by_name.get("ENV", []) + by_name.get("ARG", []))
    ):
        found.add("no secrets in layers")
    if re.search(r"# hadolint ignore=", text) and not re.search(r"#[^\n]*\n# hadolint ignore=", text):
        found.add("an exception has its reason above it")
    return found


def _first(steps: list[Instruction], name: str) -> int:
    return next(index for index, step in enumerate(steps) if step.name == name)


def _is_exec_form(arguments: str) -> bool:
    try:
        words = json.loads(arguments)
    except ValueError:
        return False
    return isinstance(words, list) and all(isinstance(word, str) for word in words)


def test_the_dockerfile_breaks_no_rule() -> None:
    assert problems(DOCKERFILE) == set()


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        (r"FROM (\S+):\S+", r"FROM \1:latest", "base is pinned"),
        (r"FROM (\S+):\S+", r"FROM \1", "base is pinned"),
        (r"USER \S+", "", "last user is not root"),
        (r"USER \S+", "USER root", "last user is not root"),
        (r"USER \S+", "USER ubuntu", "user is a number"),
        (r"--no-install-recommends ", "", "no recommended packages"),
        (r"rm -rf /var/lib/apt/lists/\*", "true", "no package lists stay"),
        (r"RUN --mount=type=cache,\S+", "RUN", "packages come through a cache mount"),
        (r",uid=1000,gid=1000", "", "may write to the cache mount"),
        (r"COPY --chown=\S+ \. \.", "COPY . .", "copied files belong to the user"),
        (r"COPY --chown=\S+ \. \.", "ADD . .", "COPY and not ADD"),
        (r"WORKDIR /lockstep", "WORKDIR lockstep", "WORKDIR is absolute"),
        (r'ENTRYPOINT \["make"\]', "ENTRYPOINT make", "exec form"),
        (r'ENTRYPOINT \["make"\]', "", "there is an entry point"),
        (r"ENV SKIP_INSTALL=1", "ENV API_KEY=abc", "no secrets in layers"),
        (r"# Unpinned: [^\n]*\n", "\n", "an exception has its reason"),
    ],
)
def test_a_fault_is_found(old: str, new: str, rule: str) -> None:
    broken, count = re.subn(old, new, DOCKERFILE, count=1)
    assert count == 1, f"the Dockerfile has no {old}"
    assert any(name.startswith(rule) or rule in name for name in problems(broken))


def test_what_is_copied_before_the_packages_are_installed_is_what_decides_them() -> None:
    """Or a change of the code installs everything again."""
    steps = instructions(DOCKERFILE)
    install = next(i for i, step in enumerate(steps) if step.name == "RUN" and "install.sh" in step.arguments)
    early = [step.arguments for step in steps[:install] if step.name == "COPY"]
    assert " ".join(early).split() == [
        "--chown=1000:1000", "pyproject.toml", "README.md", "./",
        "--chown=1000:1000", "scripts/install.sh", "scripts/install.sh",
    ]  # fmt: skip
    assert all((ROOT / name).is_file() for name in ("pyproject.toml", "README.md", "scripts/install.sh"))


def test_the_entry_point_answers_in_an_environment_that_is_used_as_it_is(tmp_path: Path) -> None:
    """What `docker run lockstep` does, outside of Docker: the image sets SKIP_INSTALL=1 and runs `make help`."""
    steps = instructions(DOCKERFILE)
    entry = json.loads(next(step.arguments for step in steps if step.name == "ENTRYPOINT"))
    command = json.loads(next(step.arguments for step in steps if step.name == "CMD"))
    done = subprocess.run(
        [*entry, *command], cwd=ROOT, env={"PATH": "/usr/bin:/bin", "SKIP_INSTALL": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "make train" in done.stdout


def test_the_build_context_leaves_out_what_no_image_needs() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", "runs", "models", ".venv*"} <= {name.rstrip("/").removeprefix("**/") for name in ignored}
