"""Replay one step of an earlier run, to find out what was wrong with it, or a whole run with rollouts made ahead.

    lockstep replay runs/latest --step 5             train on its saved rollouts and its demonstrations; print
                                                              loss, gradient norm, metrics beside those of the run
    lockstep replay runs/latest/dumps/update-000012-try-1      repeat a dumped optimizer step
    lockstep replay runs/latest --step 5 --sample    sample its prompts again, without training
    lockstep replay runs/latest --step 5 algorithm.loss=gspo   with other settings
    lockstep replay runs/mine --step 5 --sample --trust-run    with the reward and environment files of the run
    lockstep replay --run runs/latest                train it again from its beginning, with real sampling, by its log
                                                              of arrivals and versions (rollout.max_staleness)

Demonstrations of a step, also with algorithm=sft, are read again from the files that the config.yaml of the run names.
Writes nothing. Others may have written the run: code of its models is run only with model.trust_remote_code=true on
this command line; a loss or advantage of a file that its config.yaml names, demonstrations at an address, and sampling
with files, addresses or environment variables that it names, need --trust-run. Uses the newest checkpoint up to the
step; train with checkpoint.every=1 and a large checkpoint.keep to replay any step exactly. One process replays a run of
several ranks up to rounding; for the same bits start it with `accelerate launch` and the config file of the run.
A whole run is followed in one process on a CPU, and recorded with rollout.num_threads=1 (docs/asynchrony.md).
Exit status 0: success; 1: exact weights, or a whole run, gave other numbers; 2: wrong arguments or damaged files.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="directory of a run or of a dumped batch")
    parser.add_argument("--step", type=int, help="update after the step; required for a run")
    parser.add_argument("--run", action="store_true", help="train the whole run again, with rollouts made ahead")
    parser.add_argument("--sample", action="store_true", help="sample the prompts of the step without training")
    parser.add_argument(
        "--trust-run",
        action="store_true",
        help="run files, and with --sample use addresses, that its config.yaml names",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings to change")
    arguments = parser.parse_intermixed_args()

    from lockstep.rollout.errors import ConfigError, LockstepError
    from lockstep.rollout.safe_text import print_error

    try:
        if arguments.run:
            if arguments.step is not None or arguments.sample:
                raise ConfigError("--run replays a whole run, with sampling; leave out --step and --sample")
            from lockstep.lab.run_replay.replay_run import replay_run

            is_same = replay_run(arguments.path, overrides=arguments.overrides, trusts_run=arguments.trust_run)
            return 0 if is_same or arguments.overrides else 1
        if arguments.step is None and not (arguments.path / "attempt.json").is_file():
            raise ConfigError(
                f"{arguments.path} is not a dumped batch (it has no attempt.json); for a run add --step <update>"
            )
        if arguments.step is None and arguments.sample:
            raise ConfigError("--sample needs a run and --step <update>; a dumped batch holds no prompts")
        from lockstep.lab.replay import replay

        is_same = replay(
            arguments.path,
            step=arguments.step,
            sample=arguments.sample,
            overrides=arguments.overrides,
            trusts_run=arguments.trust_run,
        )
    except LockstepError as error:
        print_error(error)
        return 2
    return 0 if is_same or arguments.overrides else 1


if __name__ == "__main__":
    sys.exit(main())
