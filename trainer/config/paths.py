"""Existence of paths given by users; False for names that no file can have (too long, an unknown ~user)."""

from __future__ import annotations

import os.path


def file_exists(path: str) -> bool:
    return os.path.isfile(os.path.expanduser(path))


def path_exists(path: str) -> bool:
    return os.path.exists(os.path.expanduser(path))
