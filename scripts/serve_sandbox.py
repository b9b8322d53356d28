"""Serve sandboxes over HTTP, for trainers that run programs of the model on another machine.

    export SANDBOX_TOKEN=$(openssl rand -hex 32)
    python scripts/serve_sandbox.py --host 0.0.0.0 --token-env SANDBOX_TOKEN
    python scripts/train.py model.path=... data.path=... reward=numeric environment=sandbox \\
        environment.settings.sandbox=remote environment.settings.url=http://sandboxes:8200 \\
        environment.settings.token_env=SANDBOX_TOKEN

Programs run behind the walls of this machine's namespaces, as with sandbox=local. The protocol is that of
integrations/sandbox/remote_sandbox.py. Without a token it listens on loopback only.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import signal
import sys

from lockstep.integrations.sandbox.sandbox_service import SandboxService
from lockstep.rollout.errors import ConfigError, LockstepError
from lockstep.rollout.safe_text import print_error
from lockstep.rollout.sandbox.execution import Limits, Sandbox
from lockstep.rollout.sandbox.program_session import SessionSandbox
from lockstep.rollout.sandbox.sandbox import isolation_problem, local_enclosure


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


async def serve(given: argparse.Namespace) -> None:
    """Listen until Ctrl-C or SIGTERM. Raises `ConfigError`."""
    limits = Limits(**{field.name: getattr(given, field.name) for field in dataclasses.fields(Limits)})
    if given.max_sessions < 1 or not given.idle_s > 0:
        raise ConfigError(f"found --max-sessions {given.max_sessions} and --idle-s {given.idle_s}; set both above 0")
    token = None if given.token_env is None else os.environ.get(given.token_env)
    if given.token_env is not None and not token:
        raise ConfigError(f"--token-env: {given.token_env} is not set in the environment; export it")
    if (problem := isolation_problem(setting=None)) is not None:
        raise ConfigError(problem)

    async def make(limits: Limits) -> Sandbox:
        return await SessionSandbox.open(lambda: local_enclosure(limits, unsafe=False, setting=None))

    service = SandboxService(make, token=token, limits=limits, max_sessions=given.max_sessions, idle_s=given.idle_s)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    address = await service.start(given.host, given.port)
    print(f"sandboxes at {address}\nCtrl-C stops it", flush=True)
    await stop.wait()
    await service.close()


def main() -> None:
    try:
        asyncio.run(serve(arguments()))
    except LockstepError as error:
        print_error(error)
        sys.exit(2)


if __name__ == "__main__":
    main()
