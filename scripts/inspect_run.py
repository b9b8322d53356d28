"""Show metrics and rollouts of a run in the terminal.

    lockstep inspect-run runs/latest                      last metrics, best and worst rollout
    lockstep inspect-run runs/latest --worst 5 --failed   the five lowest rewards, and all that failed
    lockstep inspect-run runs/latest --step 5 --rollout 3 --tokens

`--tokens` prints every token with its id and the engine's logprob; trained tokens are bold.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "run", type=Path, nargs="?", default=Path("runs/latest"), help="run directory (default: runs/latest)"
    )
    parser.add_argument("--step", type=int, help="update whose rollouts are shown (default: the newest saved)")
    parser.add_argument("--rollout", type=int, help="id of the rollout to show (default: the best and the worst)")
    parser.add_argument("--best", type=int, default=0, metavar="N", help="show the N rollouts with the highest rewards")
    parser.add_argument("--worst", type=int, default=0, metavar="N", help="show the N rollouts with the lowest rewards")
    parser.add_argument("--failed", action="store_true", help="show the rollouts that failed and are not trained")
    parser.add_argument("--metrics", action="store_true", help="show all metrics")
    parser.add_argument("--tokens", action="store_true", help="also print every token with its id and logprob")
    arguments = parser.parse_args()
    if min(arguments.best, arguments.worst) < 0:
        parser.error("--best and --worst take a number of rollouts, 1 or more")

    from lockstep.lab.inspect_run import Selection, show_run
    from lockstep.rollout.errors import LockstepError
    from lockstep.rollout.safe_text import print_error

    selection = Selection(
        rollout_id=arguments.rollout, best=arguments.best, worst=arguments.worst, failed=arguments.failed
    )
    try:
        return show_run(
            arguments.run,
            step=arguments.step,
            selection=selection,
            all_metrics=arguments.metrics,
            with_tokens=arguments.tokens,
        )
    except LockstepError as error:
        print_error(error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
