"""Evaluate a model on held-out prompts, with confidence intervals.

    lockstep evaluate model.path=... data.heldout_path=my.jsonl reward=numeric eval.samples_per_prompt=8
    lockstep evaluate experiment=demo model.path=runs/first/model eval.compare_to=models/calculator
    lockstep evaluate experiment=demo model.path=... eval.output=after.json eval.compare_to=before.json

Prints mean reward and pass@k with intervals; the last line is JSON. Settings are those of training
(trainer/config/schema.py); docs/evaluation.md explains them.
"""

from functools import partial

from lockstep.trainer.checks.validate import validate


def main(config) -> None:
    from lockstep.trainer.evaluate.evaluator import run

    run(config)


if __name__ == "__main__":
    import sys

    from lockstep.rollout.errors import ConfigError
    from lockstep.rollout.safe_text import print_error
    from lockstep.trainer.cli import launch  # here, because engine processes import this file too
    from lockstep.trainer.tools.run_as_word import refuse_runs

    try:
        refuse_runs(sys.argv[1:])
    except ConfigError as error:
        print_error(error)
        sys.exit(2)
    launch(
        main,
        check=partial(validate, trains=False),
        description=__doc__,
        frequent=("model.path", "data.heldout_path", "reward.functions", "eval.samples_per_prompt", "eval.compare_to"),
    )
