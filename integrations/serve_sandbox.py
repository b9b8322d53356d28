"""Service of sandboxes for trainers on other machines (`lockstep serve-sandbox`)."""

from __future__ import annotations

import asyncio
import os
import signal

from lockstep.integrations.sandbox.sandbox_service import SandboxService
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.sandbox.execution import Limits, Sandbox
from lockstep.rollout.sandbox.program_session import SessionSandbox
from lockstep.rollout.sandbox.sandbox import isolation_problem, local_enclosure


async def serve(
    *, host: str, port: int, token_env: str | None, limits: Limits, max_sessions: int, idle_s: float
) -> None:
    """Listen until Ctrl-C or SIGTERM. token_env: variable with the token of clients. Raises `ConfigError`."""
    if max_sessions < 1 or not idle_s > 0:
        raise ConfigError(f"found --max-sessions {max_sessions} and --idle-s {idle_s}; set both above 0")
    token = None if token_env is None else os.environ.get(token_env)
    if token_env is not None and not token:
        raise ConfigError(f"--token-env: {token_env} is not set in the environment; export it")
    if (problem := isolation_problem(setting=None)) is not None:
        raise ConfigError(problem)

    async def make(limits: Limits) -> Sandbox:
        return await SessionSandbox.open(lambda: local_enclosure(limits, unsafe=False, setting=None))

    service = SandboxService(make, token=token, limits=limits, max_sessions=max_sessions, idle_s=idle_s)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    address = await service.start(host, port)
    print(f"sandboxes at {address}\nCtrl-C stops it", flush=True)
    await stop.wait()
    await service.close()
