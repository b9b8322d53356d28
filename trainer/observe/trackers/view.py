"""Paths and programs in printed commands."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path


def short_path(path: Path) -> str:
    """Return a path relative to the working directory if it is below that, else an absolute one."""
    # Not resolved further: a link such as runs/latest stays as the user knows it.
    absolute, here = Path(os.path.abspath(path)), Path.cwd()
    return str(absolute.relative_to(here)) if absolute.is_relative_to(here) else str(absolute)


def lockstep() -> str:
    """Return the command `lockstep` of this Python environment; where it has no entry point, that of the module."""
    return program("lockstep") if (Path(sys.prefix) / "bin/lockstep").exists() else f"{program('python')} -m lockstep"


def program(name: str) -> str:
    """Return a program of this Python environment as a shell finds it: by its path unless the environment is active.

    `make` uses an environment that its user has not activated.
    """
    is_active = sys.prefix == sys.base_prefix or os.environ.get("VIRTUAL_ENV") == sys.prefix
    return name if is_active else shlex.quote(short_path(Path(sys.prefix) / "bin" / name))
