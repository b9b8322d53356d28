"""Paths in printed commands."""

from __future__ import annotations

import os
from pathlib import Path


def shown(path: Path) -> str:
    """Return a path relative to the working directory if it is below that, else an absolute one."""
    # Not resolved further: a link such as runs/latest stays as the user knows it.
    absolute, here = Path(os.path.abspath(path)), Path.cwd()
    return str(absolute.relative_to(here)) if absolute.is_relative_to(here) else str(absolute)
