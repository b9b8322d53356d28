"""Sample held-out prompts from a model, score them, and say how sure the numbers are.

    python scripts/evaluate.py model.path=runs/latest/model
    python scripts/evaluate.py model.path=... eval.samples_per_prompt=8 eval.temperature=1.0 data.heldout_path=my.jsonl
    python scripts/evaluate.py model.path=runs/latest/model eval.compare_to=models/calculator
    python scripts/evaluate.py model.path=... eval.output=after.json eval.compare_to=before.json

Prints mean reward and pass@k with intervals; the last line is JSON. The settings are those of training
(trainer/config/schema.py), docs/evaluation.md explains them.
"""

from functools import partial

from trainer.checks.validate import validate


def main(config) -> None:
    from trainer.evaluate.evaluator import run

    run(config)


if __name__ == "__main__":
    from trainer.cli import launch  # only here: an engine's process loads this file, too

    launch(main, check=partial(validate, trains=False))
