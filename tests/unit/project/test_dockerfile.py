"""The Dockerfile against this checkout. `make lint` runs hadolint on it; no Docker is needed for either."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

from tests.fixtures.paths import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text()


def arguments(instruction: str) -> list[str]:
    return re.findall(rf"^{instruction} (.*)$", DOCKERFILE, re.MULTILINE)


def test_nothing_runs_as_root_and_the_user_owns_the_files() -> None:
    assert arguments("USER") == ["1000:1000"], "hadolint refuses root as the last user, but not a missing USER"
    assert all(copied.startswith("--chown=1000:1000 ") for copied in arguments("COPY"))


def test_packages_are_installed_before_the_code_is_copied() -> None:
    """A change of the code does not install them again; the empty packages are those that pyproject.toml installs."""
    before, _, after = DOCKERFILE.partition("bash scripts/install.sh")
    assert re.findall(r"^COPY --chown=\S+ (.*)$", before, re.MULTILINE) == [
        "pyproject.toml README.md ./",
        "requirements requirements",
        "scripts/install.sh scripts/install.sh",
    ]
    assert "COPY --chown=1000:1000 . ." in after
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    packages = [pattern.removesuffix("*") for pattern in found]
    assert f"mkdir {' '.join(packages)} " in before
    assert "touch " + " ".join(f"{package}/__init__.py" for package in packages) in before


def test_the_entry_point_lists_the_targets() -> None:
    """`docker run lockstep` without Docker: the image sets SKIP_INSTALL=1 and runs `make help`."""
    assert arguments("ENV") == ["SKIP_INSTALL=1"]
    command = [*json.loads(arguments("ENTRYPOINT")[0]), *json.loads(arguments("CMD")[0])]
    environment = {"PATH": "/usr/bin:/bin", "SKIP_INSTALL": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert "make train" in done.stdout


KEY_FILES = (".env", ".env.local", ".netrc", "tls.key", "tls.pem")


def test_files_that_hold_keys_reach_neither_the_image_nor_the_repository(tmp_path: Path) -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    for name in KEY_FILES:  # Docker matches a pattern without **/ at the top only
        assert any(fnmatch(name, pattern.removeprefix("**/")) for pattern in ignored if pattern.startswith("**/")), name
    shutil.copy(ROOT / ".gitignore", tmp_path)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    asked = [*KEY_FILES, *(f"below/{name}" for name in KEY_FILES)]
    found = subprocess.run(["git", "-C", tmp_path, "check-ignore", *asked], capture_output=True, text=True, check=False)
    assert found.stdout.split() == asked
