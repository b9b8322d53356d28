"""Files of directories that others may have written: read within limits and only if regular, written without following
links.

A pipe would block its reader forever, a device has no end, and a sparse file is larger than the memory. A link could
lead a writer to any file of the user.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

MAX_BYTES = 2**26
"""Maximum size of a file that is read whole."""
MAX_LINE_BYTES = 2**28
"""Maximum size of a line: a rollout of a million tokens has 50 million bytes."""


def read_plain(path: Path, *, limit: int = MAX_BYTES, errors: str = "strict") -> str:
    """Read a file as UTF-8. Raises OSError unless it is a regular file of at most `limit` bytes, UnicodeError."""
    with opened_plain(path) as file:
        raw = file.read(limit + 1)
    if len(raw) > limit:
        raise OSError(f"{path} has more than {limit} bytes")
    return raw.decode(errors=errors)


def plain_lines(path: Path, *, limit: int = MAX_LINE_BYTES) -> Iterator[str]:
    """Yield the lines of a file as UTF-8, with invalid bytes replaced. Raises OSError unless it is a regular file with
    lines of at most `limit` bytes."""
    with opened_plain(path) as file:
        while line := file.readline(limit + 1):
            if len(line) > limit:
                raise OSError(f"{path} has a line of more than {limit} bytes")
            yield line.decode(errors="replace")


def opened_plain(path: Path) -> BinaryIO:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # otherwise opening a pipe waits for its writer
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    return open(descriptor, "rb")


LATEST = "latest"
"""Name of the link to the newest run, and to the newest checkpoint of a run."""


def behind_link(path: Path) -> Path:
    """Return where a path leads now. A link such as runs/latest, also within it, may be moved while files are read."""
    for link in (path, *path.parents):
        if link.is_symlink() and (link == path or link.name == LATEST):
            return link.parent / link.readlink() / path.relative_to(link)
    return path


def own_output(path: Path) -> Path:
    """Return the path of a new or regular file.

    Raises OSError for a link or a special file, which could lead to another file of the user.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise OSError(
            f"{path} is a link or no regular file, so it is not written; remove it, or name a file with --out"
        )
    return path


def write_whole(path: Path, content: bytes) -> None:
    """Write a file under a temporary name and rename it; a link, a pipe or a device is written through.

    Creates its directories. On failure an older file is kept. Raises OSError.
    """
    if path.exists() and not path.is_file():  # a pipe or a device cannot be replaced
        path.write_bytes(content)
        return
    path = path.resolve()  # a link stays a link
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.unlink(missing_ok=True)  # of a killed process, or a link to elsewhere
        with partial.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
