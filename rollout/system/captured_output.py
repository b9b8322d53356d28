"""Output of processes: this one's into a file, also what bypasses Python's streams, and the end of its children's."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

SILENT = logging.Logger("servers of this process")
"""For aiohttp, which logs the bytes of malformed requests, keys included, and a traceback for each client that left."""
SILENT.disabled = True


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
        for descriptor, duplicate in console.items():
            os.dup2(duplicate, descriptor)
            os.close(duplicate)
        os.close(log)


class OutputTail:
    """The end of what child processes write. Threads read their pipes: no child waits for a reader, nothing grows."""

    def __init__(self, limit: int = 2000) -> None:
        """limit: bytes to keep."""
        self._limit, self._kept = limit, b""
        self._reader: threading.Thread | None = None

    def follow(self, pipe: IO[bytes] | None) -> OutputTail:
        """Read a pipe to its end in a thread, and close it."""
        assert pipe is not None, "the child was started with a pipe"
        self._reader = threading.Thread(target=self._read, args=(pipe,), name="output-tail", daemon=True)
        self._reader.start()
        return self

    def add(self, part: bytes) -> None:
        self._kept = (self._kept + part)[-self._limit :]

    def text(self, *, wait_s: float = 0.0) -> str:
        """Return the end, after waiting for the end of the last pipe: a child of a child may hold it open."""
        if self._reader is not None:
            self._reader.join(wait_s)
        return self._kept.decode(errors="replace").strip()

    def clear(self) -> None:
        self._kept = b""

    def _read(self, pipe: IO[bytes]) -> None:
        with pipe:
            while part := os.read(pipe.fileno(), 2**20):
                self.add(part)
