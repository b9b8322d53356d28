"""Sample held-out prompts from a model and score them.

    python scripts/evaluate.py model.path=runs/latest/model
    python scripts/evaluate.py model.path=... eval.samples_per_prompt=8 eval.temperature=1.0 data.heldout_path=my.jsonl

Prints mean reward and its parts; the last line is JSON. The settings are those of training (trainer/config.py).
"""

from trainer.launch import launch


def main(config) -> None:
    from trainer.evaluation import run

    run(config)


if __name__ == "__main__":
    launch(main)
