"""Start a vLLM server that training samples from and sends weights to.

    export LOCKSTEP_ENGINE_KEY=$(openssl rand -hex 32)
    lockstep serve-engine model.path=... server.port=8001
    lockstep train model.path=... data.path=... reward=numeric rollout.urls=[http://127.0.0.1:8001] \\
        rollout.engine=server

Prints the command that it runs. Give it the same model and settings as the training (trainer/config/schema.py).
docs/engines.md shows how to place servers and trainers. `lockstep serve` serves people and agents, also in front
of such a server.
"""

from functools import partial

from lockstep.trainer.checks.validate import validate
from lockstep.trainer.cli import launch


def main(config) -> None:
    from lockstep.trainer.tools.serve_engine import run

    run(config)


if __name__ == "__main__":
    launch(main, check=partial(validate, needs_data=False), description=__doc__)
