"""Whether a path that somebody wrote is there. A name that no file can have (too long, an unknown ~user) is not."""

from __future__ import annotations

from pathlib import Path


def file_exists(path: str) -> bool:
    try:
        return Path(path).expanduser().is_file()
    except (OSError, RuntimeError, ValueError):
        return False


def path_exists(path: str) -> bool:
    try:
        return Path(path).expanduser().exists()
    except (OSError, RuntimeError, ValueError):
        return False
