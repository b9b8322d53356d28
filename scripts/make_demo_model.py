"""Make the demo: the data of a task, and a tiny model that solves it sometimes and can be trained.

    lockstep make-demo-model                     # calculator, about a minute on two cores
    lockstep make-demo-model --task chain
    lockstep make-demo-model --task squares      # with images
    lockstep make-demo-model --architecture falcon_h1

Writes train.jsonl and heldout.jsonl to data/demo/<task> and the model with its tokenizer to models/<task>. A second
call finds them and ends. The recipe is in demo/.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lockstep.demo.manifest import ARCHITECTURE_NAMES, DEFAULT_ARCHITECTURE, TASK_NAMES, find_made
from lockstep.rollout.errors import LockstepError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--task", choices=TASK_NAMES, default="calculator", help="task of the demo (default: calculator)"
    )
    parser.add_argument(
        "--architecture", choices=ARCHITECTURE_NAMES, default=DEFAULT_ARCHITECTURE,
        help=f"model type of the model (default: {DEFAULT_ARCHITECTURE})",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, help="directory of the model (default: models/<task>, or models/<task>-<architecture>)"
    )
    parser.add_argument("--data", type=Path, help="directory of the data (default: data/demo/<task>)")
    parser.add_argument("--seed", type=int, default=0, help="seed of data, initialization and warm start (default: 0)")
    arguments = parser.parse_args()
    architecture = arguments.architecture
    suffix = "" if architecture == DEFAULT_ARCHITECTURE else f"-{architecture}"
    model_dir = arguments.out or Path("models") / f"{arguments.task}{suffix}"
    data_dir = arguments.data or Path("data") / "demo" / arguments.task
    try:
        demo = find_made(arguments.task, model_dir, data_dir, arguments.seed, architecture)
        if demo is not None:
            print(f"{demo.task}: {model_dir} and {data_dir} exist already, made by this recipe")
            return 0
        from rich.console import Console  # imported only if needed, because torch loads slowly

        from lockstep.demo.make import make_demo
        from lockstep.trainer.run.library_logs import quiet_third_parties

        quiet_third_parties()
        make_demo(arguments.task, model_dir, data_dir, arguments.seed, Console(), architecture)
    except LockstepError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
