"""Examine a policy loss or an advantage, built-in or of a file, before it trains anything.

    lockstep check-loss my_loss.py:sharp                    a loss of yours
    lockstep check-loss my_loss.py:sharp sharpness=3        with settings
    lockstep check-loss my_advantage.py:median              an advantage of yours
    lockstep check-loss gspo clip_low=0.3 clip_high=0.4     a built-in one

Loss: one loss per token, that of the token alone; metrics that add up; autograd against finite differences; extreme
log ratios.
Advantage: the same for every order of rollouts; groups of equal rewards, of one rollout, of other sizes.
Both: the trainer's own update of a tiny model has the same gradient for every division of a step into ranks,
microbatches and rows, with every denominator, in one process and in two.
On the CPU, in some ten seconds, without an engine. The tutorial is docs/tutorials/own_loss.md.
Exit status 0: all checks passed; 1: a check failed; 2: the function or a setting cannot be used.
Experimental: each version adds checks, so that a loss which passes today may fail tomorrow.
"""

from __future__ import annotations

import argparse
import sys


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("function", help="path/to/file.py:function, or a built-in name")
    parser.add_argument("settings", nargs="*", metavar="name=value", help="settings of the function")
    arguments = parser.parse_args()

    from lockstep.lab.losses.check_objective import check_objective
    from lockstep.rollout.errors import ConfigError
    from lockstep.rollout.safe_text import print_error

    try:
        return 0 if check_objective(arguments.function, arguments.settings) else 1
    except ConfigError as error:
        print_error(error)
        return 2


if __name__ == "__main__":
    sys.exit(main())
