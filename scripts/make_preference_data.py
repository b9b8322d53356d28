"""Make a preference task: a small pretrained language model, queries, and comparisons labeled by a noisy judge.

    lockstep make-preference-data --task sentiment          # about 90 s of CPU time
    lockstep make-preference-data --task descriptiveness

Writes models/<task>_lm and data/preferences/<task>/. The recipe is in demo/preferences/.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lockstep.rollout.errors import LockstepError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--task", choices=("sentiment", "descriptiveness"), default="sentiment", help="task (default: sentiment)"
    )
    parser.add_argument("--out", type=Path, help="directory of the model (default: models/<task>_lm)")
    parser.add_argument("--data", type=Path, help="directory of the data (default: data/preferences/<task>)")
    parser.add_argument("--seed", type=int, default=0, help="seed of data and model (default: 0)")
    arguments = parser.parse_args()
    from lockstep.demo.preferences.make import make_preferences
    from lockstep.trainer.run.library_logs import quiet_third_parties

    quiet_third_parties()
    model_dir = arguments.out or Path("models") / f"{arguments.task}_lm"
    data_dir = arguments.data or Path("data") / "preferences" / arguments.task
    try:
        make_preferences(arguments.task, model_dir, data_dir, seed=arguments.seed)
    except LockstepError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{arguments.task}: model in {model_dir}, data in {data_dir}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
