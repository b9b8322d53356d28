"""Make the demo: a task's data and a tiny model that solves it some of the time, ready to be trained.

    python scripts/make_demo_model.py                     # calculator, about a minute on two cores
    python scripts/make_demo_model.py --task chain

Writes train.jsonl and heldout.jsonl to data/demo/<task> and the model with its tokenizer to models/<task>. A second
call finds them and returns. The recipe is in demo/.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from demo.manifest import TASK_NAMES, find_made
from rollout.errors import LockstepError


def main() -> int:
    parser = argparse.ArgumentParser(description="Make a demo task's data and its warm-started model.")
    parser.add_argument("--task", choices=TASK_NAMES, default="calculator")
    parser.add_argument("--out", type=Path, help="directory of the model (default: models/<task>)")
    parser.add_argument("--data", type=Path, help="directory of the data (default: data/demo/<task>)")
    parser.add_argument("--seed", type=int, default=0, help="of data, initialization and warm start")
    arguments = parser.parse_args()
    model_dir = arguments.out or Path("models") / arguments.task
    data_dir = arguments.data or Path("data") / "demo" / arguments.task
    try:
        made = find_made(arguments.task, model_dir, data_dir, arguments.seed)
        if made is not None:
            print(f"{made.task}: {model_dir} and {data_dir} are there already, made by this recipe")
            return 0
        from rich.console import Console  # torch and transformers are imported only when there is work for them

        from demo.make import make_demo
        from trainer.run.library_logs import quiet_third_parties

        quiet_third_parties()
        make_demo(arguments.task, model_dir, data_dir, arguments.seed, Console())
    except LockstepError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
