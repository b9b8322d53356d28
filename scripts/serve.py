"""Serve a model behind an OpenAI-compatible URL, with token ids and logprobs on every answer.

    python scripts/serve.py model.path=runs/latest/model
    python scripts/serve.py model.path=... gateway.port=8000 gateway.model_name=mine rollout.max_tokens_per_turn=256
    python scripts/serve.py model.path=... rollout.engine=server rollout.urls=[http://127.0.0.1:8001]

Prints the base URL and the key for any OpenAI client. docs/gateway.md lists what is exact and what is refused.
The settings are those of training (trainer/config/schema.py), so training would sample from the same distribution.
"""


def main(config) -> None:
    from trainer.tools.serve_gateway import run  # torch and vLLM: load them after the settings were checked

    run(config)


if __name__ == "__main__":
    from trainer.cli import launch  # only here: engine processes import this file too

    launch(main, needs_data=False)
