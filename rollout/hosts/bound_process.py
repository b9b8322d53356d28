"""A program whose process group ends with the process that started it, also when that one is killed.

    python bound_process.py <descriptor> program argument ...

descriptor: the reading end of a pipe whose writing end only the starter holds. The kernel sends SIGKILL to the group
when the last writer is gone; the program is executed in place of this one and keeps the arrangement.
Imports the standard library only.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys

_F_SETSIG = 10  # linux/fcntl.h; the fcntl module does not name it


def main() -> None:
    life, command = int(sys.argv[1]), sys.argv[2:]
    os.set_inheritable(life, True)
    die_with_writers(life)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]} cannot be started: {error.strerror}")


def die_with_writers(pipe: int) -> None:
    """Let the kernel kill this process group when the last writer of a pipe is gone."""
    fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(pipe, _F_SETSIG, int(signal.SIGKILL))
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)


if __name__ == "__main__":
    main()
