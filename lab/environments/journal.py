"""Journal of an examination: what it is doing now, with a time limit, and what it has found, as lines of JSON.

    {"begin": 7, "what": "step of Guess", "limit_s": 10.0}      user code is called
    {"end": 7}                                                  it has returned
    {"finding": {"check": ..., "verdict": ..., ...}}            a line of the table
    {"done": true}                                              all checks were made

The examination runs in a process of its own (`lab/environments/supervisor.py`), which code of a user may
block or end. The other side then still knows what was called last.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from lockstep.lab.finding import Finding


class Journal:
    """Writer of the journal; usable from several threads."""

    def __init__(self, file: IO[str] | None = None) -> None:
        """file: open for writing; None: write nothing."""
        self._file = file
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    @contextmanager
    def doing(self, what: str, *, limit_s: float) -> Iterator[None]:
        """Announce a piece of work, and its end. limit_s: after which it may be ended with the process."""
        number = next(self._numbers)
        self._write({"begin": number, "what": what, "limit_s": limit_s})
        try:
            yield
        finally:
            self._write({"end": number})

    def add(self, finding: Finding) -> None:
        self._write({"finding": dataclasses.asdict(finding)})

    def done(self) -> None:
        self._write({"done": True})

    def _write(self, entry: dict[str, Any]) -> None:
        if self._file is not None:
            with self._lock:
                self._file.write(json.dumps(entry) + "\n")
                self._file.flush()
