"""Serve sandboxes over HTTP, for trainers that run programs of the model on another machine.

    export SANDBOX_TOKEN=$(openssl rand -hex 32)
    lockstep serve-sandbox --host 0.0.0.0 --token-env SANDBOX_TOKEN
    lockstep train model.path=... data.path=... reward=numeric environment=sandbox \\
        environment.settings.sandbox=remote environment.settings.url=http://sandboxes:8200 \\
        environment.settings.token_env=SANDBOX_TOKEN

Programs run behind the walls of this machine's namespaces, as with sandbox=local. The protocol is that of
integrations/sandbox/remote_sandbox.py. Without a token it listens on loopback only.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys

from lockstep.integrations.serve_sandbox import serve
from lockstep.rollout.errors import LockstepError
from lockstep.rollout.safe_text import print_error
from lockstep.rollout.sandbox.execution import Limits


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8200, help="port; 0: a free one")
    parser.add_argument("--token-env", help="environment variable with the token that clients send")
    parser.add_argument("--max-sessions", type=int, default=64, help="sessions at once; further ones are refused")
    parser.add_argument("--idle-s", type=float, default=1800.0, help="time without a request that ends a session [s]")
    for field in dataclasses.fields(Limits):
        default = {"timeout_s": 60.0}.get(field.name, field.default)
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, type=type(field.default), default=default, help="highest limit of a program")
    return parser.parse_args()


def main() -> None:
    try:
        options = vars(arguments())
        limits = Limits(**{field.name: options.pop(field.name) for field in dataclasses.fields(Limits)})
        asyncio.run(serve(limits=limits, **options))
    except LockstepError as error:
        print_error(error)
        sys.exit(2)


if __name__ == "__main__":
    main()
