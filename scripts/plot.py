"""Draw reward and mismatch of one or more runs over their updates.

    lockstep plot                                   runs/latest -> runs/latest/curves.png
    lockstep plot runs/a runs/b --out compare.png
    lockstep plot runs/a --metrics objective/score objective/kl     other metrics, one panel each

Writes PNG, or SVG if `--out` ends with it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "runs", type=Path, nargs="*", default=[Path("runs/latest")], help="run directories (default: runs/latest)"
    )
    parser.add_argument("--out", type=Path, help="PNG or SVG to write (default: curves.png in the first run)")
    parser.add_argument("--metrics", nargs="+", help="names of metrics to draw instead, one panel each")
    arguments = parser.parse_args()

    from lockstep.lab.plot import plot_runs
    from lockstep.rollout.errors import LockstepError
    from lockstep.rollout.safe_text import print_error

    try:
        print(plot_runs(arguments.runs, arguments.metrics, arguments.out))
    except (LockstepError, OSError, ValueError) as error:  # matplotlib's for an unknown format
        print_error(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
