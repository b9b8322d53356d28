"""Start a vLLM server that training samples from and sends weights to.

    export LOCKSTEP_ENGINE_KEY=$(openssl rand -hex 32)
    python scripts/serve_engine.py model.path=... server.port=8001
    python scripts/train.py model.path=... rollout.engine=server rollout.urls=[http://127.0.0.1:8001]

Prints the command that it runs. The model and its settings are those of training (trainer/config/schema.py), so give
both the same. Where to put which: docs/engines.md. For people and agents: scripts/serve.py, which can stand in front of
it.
"""

from trainer.cli import launch


def main(config) -> None:
    from trainer.tools.serve_engine import run

    run(config)


if __name__ == "__main__":
    launch(main, needs_data=False)
