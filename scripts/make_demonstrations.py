"""Write conversations of the demo's scripted player, to train on by algorithm=sft or beside rollouts.

    lockstep make-demonstrations                     # calculator
    lockstep make-demonstrations --task chain

Writes demonstrations.jsonl and demonstrations_heldout.jsonl to data/demo/<task>. Takes seconds.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lockstep.demo.manifest import TASK_NAMES
from lockstep.rollout.errors import LockstepError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASK_NAMES, default="calculator", help="task (default: calculator)")
    parser.add_argument("--data", type=Path, help="directory of the files (default: data/demo/<task>)")
    parser.add_argument("--count", type=int, default=1024, help="conversations per file (default: 1024)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the rows (default: 0)")
    arguments = parser.parse_args()
    try:
        from lockstep.demo.played import write_demonstrations  # here, because torch loads slowly

        directory = arguments.data or Path("data") / "demo" / arguments.task
        for path in write_demonstrations(arguments.task, directory, seed=arguments.seed, count=arguments.count):
            print(path)
    except LockstepError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
