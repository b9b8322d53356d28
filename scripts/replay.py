"""Run one step of an earlier run again, to find out what was wrong with it.

    python scripts/replay.py runs/latest --step 5                 train on its saved rollouts: loss, gradient norm,
                                                                  metrics, beside what the run logged
    python scripts/replay.py runs/latest/dumps/update-000012-try-1    an optimizer step that the run refused
    python scripts/replay.py runs/latest --step 5 --sample        sample its prompts, train nothing
    python scripts/replay.py runs/latest --step 5 algorithm.loss=gspo    with other settings

Nothing is written. Weights come from the newest checkpoint that is not newer than the step; a run with
checkpoint.every=1 and checkpoint.keep as large as it is long can be replayed exactly anywhere. A run of several ranks
is replayed on one process, to rounding; for the same bits put `accelerate launch` with its config file in front.
Exit status 0: done; 1: the weights are those of the step, and yet the numbers differ from the run's; 2: a mistake.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="directory of a run, or of a dumped batch")
    parser.add_argument("--step", type=int, help="update that the step ended with; needed for a run")
    parser.add_argument("--sample", action="store_true", help="sample its prompts instead of training on its rollouts")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings to change")
    arguments = parser.parse_intermixed_args()

    from rollout.errors import ConfigError, LockstepError

    try:
        if arguments.step is None and not (arguments.path / "attempt.json").is_file():
            raise ConfigError(
                f"{arguments.path} is no dumped batch (no attempt.json in it); for a run add --step <update>"
            )
        from trainer.tools.replay import replay

        is_same = replay(arguments.path, step=arguments.step, sample=arguments.sample, overrides=arguments.overrides)
    except LockstepError as error:
        print(f"lockstep: {error}", file=sys.stderr)
        return 2
    return 0 if is_same or arguments.overrides else 1


if __name__ == "__main__":
    sys.exit(main())
