"""Make the demo: a task's data and a tiny model that is middling at it, ready to be trained.

    python scripts/make_demo_model.py                     # calculator, about a minute on two cores
    python scripts/make_demo_model.py --task chain

Writes train.jsonl and heldout.jsonl to data/demo/<task> and the model with its tokenizer to models/<task>. A second
call finds them and returns. The recipe and its reasons are in rollout/demo/.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

TASK_NAMES = ("calculator", "chain", "reverse")


def main() -> int:
    parser = argparse.ArgumentParser(description="Make a demo task's data and its warm-started model.")
    parser.add_argument("--task", choices=TASK_NAMES, default="calculator")
    parser.add_argument("--out", type=Path, help="directory of the model (default: models/<task>)")
    parser.add_argument("--data", type=Path, help="directory of the data (default: data/demo/<task>)")
    parser.add_argument("--seed", type=int, default=0, help="of data, initialisation and warm start")
    arguments = parser.parse_args()

    from rich.console import Console  # imported here: --help and typing errors answer at once

    from rollout.demo import make_demo
    from rollout.errors import LockstepError

    try:
        make_demo(
            arguments.task,
            arguments.out or Path("models") / arguments.task,
            arguments.data or Path("data") / "demo" / arguments.task,
            arguments.seed,
            Console(),
        )
    except LockstepError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
