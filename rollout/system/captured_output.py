"""Redirection of this process's output to a file, including output that bypasses Python's streams."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def redirect_output(log_path: Path) -> Iterator[None]:
    """Append stdout and stderr of this process to a file. Child processes started in the block keep writing to it."""
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    console = {descriptor: os.dup(descriptor) for descriptor in (1, 2)}
    try:
        for descriptor in console:
            os.dup2(log, descriptor)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, saved in console.items():
            os.dup2(saved, descriptor)
            os.close(saved)
        os.close(log)
