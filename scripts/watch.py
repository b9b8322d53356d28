"""Serve a live page about training runs on this machine: curves side by side, alarms, rollouts.

    lockstep watch                          the runs in runs/
    lockstep watch runs/mine --port 8080    one run, at a port of your choice
    lockstep watch runs/a runs/b            two of them

It only reads, answers this machine alone, and asks no other host. Ctrl-C ends it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "runs", type=Path, nargs="*", default=[Path("runs")], help="folders of runs, or runs (default: runs)"
    )
    parser.add_argument("--port", type=int, default=0, help="port (default: a free one)")
    arguments = parser.parse_args()

    from lockstep.lab.watch.page_server import serve
    from lockstep.rollout.safe_text import print_error

    for folder in arguments.runs:
        if not folder.is_dir():
            print_error(f"{folder} is not a directory; name the folder of your runs, for example runs")
            return 2
    try:
        serve(arguments.runs, arguments.port)
    except (OSError, OverflowError) as error:
        print_error(f"port {arguments.port} cannot be used: {error}; leave --port out for a free one")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
