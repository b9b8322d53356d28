"""Serve a model behind an OpenAI-compatible URL, with token ids and logprobs on every answer.

    lockstep serve model.path=runs/latest/model
    lockstep serve model.path=... gateway.port=8000 gateway.model_name=mine rollout.max_tokens_per_turn=256
    lockstep serve model.path=... rollout.engine=server rollout.urls=[http://127.0.0.1:8001]

Prints the base URL and the key for any OpenAI client. docs/gateway.md lists the supported requests.
Settings are those of training (trainer/config/schema.py), so samples come from the same distribution.
"""

from functools import partial

from lockstep.trainer.checks.validate import validate


def main(config) -> None:
    from lockstep.integrations.serve_gateway import (
        run,
    )  # after the settings are checked, because torch and vLLM load slowly

    run(config)


if __name__ == "__main__":
    from lockstep.trainer.cli import launch  # here, because engine processes import this file too

    launch(main, check=partial(validate, needs_data=False), description=__doc__)
