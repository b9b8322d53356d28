"""Settings of a sandbox that lives for an episode: local, in a container, or of a remote service."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from lockstep.integrations.sandbox.containers import container_enclosure, container_problem
from lockstep.integrations.sandbox.remote_sandbox import RemoteSandbox
from lockstep.rollout.errors import ConfigError, SandboxError
from lockstep.rollout.sandbox import ENVIRONMENT_SETTING
from lockstep.rollout.sandbox.execution import Language, Limits, Sandbox
from lockstep.rollout.sandbox.program_session import SessionSandbox
from lockstep.rollout.sandbox.sandbox import local_enclosure, refuse_unisolated_root

SHOWN = "environment.settings"
BELONGS = {"unsafe": "local", "image": "docker", "docker_program": "docker", "url": "remote", "token_env": "remote"}
"""Kind of sandbox of each setting that not all have."""
KINDS = tuple(dict.fromkeys(BELONGS.values()))
TRIALS = {Language.PYTHON: "print(6 * 7)", Language.SHELL: "echo $((6 * 7))"}
TRIAL_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSettings:
    """Where programs run, checked."""

    sandbox: str = "local"
    """local: namespaces of this system; docker: a container; remote: a service (`remote_sandbox.py`)."""
    unsafe: bool | None = None
    """Run programs without isolation, with the rights of this process; for systems without namespaces."""
    image: str | None = None
    """Image with Python 3.9 or newer, on the daemon's machine."""
    docker_program: str | None = None
    """Program that takes the arguments of Docker; None: docker."""
    url: str | None = None
    """Address of the service."""
    token_env: str | None = None
    """Environment variable with the service's token."""
    limits: Limits

    @classmethod
    def of(cls, *, timeout_s: float = 10.0, output_bytes: int = 4096, **settings: Any) -> SandboxSettings:
        """Return the settings, which hold the `Limits` of one call by their names. output_bytes: what the model reads
        of each output.

        Raises `ConfigError` if one is wrong, and `TypeError` for an unknown one.
        """
        names = {field.name for field in fields(Limits)} & settings.keys()
        limits = {name: settings.pop(name) for name in names}
        try:
            all_limits = Limits(timeout_s=timeout_s, output_bytes=output_bytes, **limits)
        except ConfigError as error:
            raise ConfigError(f"environment {error}; set it under {SHOWN}") from error
        return cls(limits=all_limits, **settings)

    def __post_init__(self) -> None:
        if self.sandbox not in KINDS:
            raise ConfigError(
                f"{SHOWN}.sandbox={self.sandbox!r} is not one of {', '.join(KINDS)}; set {SHOWN}.sandbox=local"
            )
        for name, kind in BELONGS.items():
            value, hint = getattr(self, name), bool if name == "unsafe" else str
            if value is not None and not (isinstance(value, hint) and value != ""):  # the text "false" would be true
                expected = "true or false" if hint is bool else "a text"
                raise ConfigError(f"{SHOWN}.{name}={value!r} is not {expected}; leave it out")
            if value is not None and kind != self.sandbox:
                raise ConfigError(
                    f"{SHOWN}.{name} is for sandbox={kind}, found sandbox={self.sandbox}; leave it out, or set "
                    f"{SHOWN}.sandbox={kind}"
                )
        if self.sandbox == "local":
            refuse_unisolated_root(bool(self.unsafe))
        if self.sandbox == "docker" and self.image is None:
            raise ConfigError(
                f"sandbox=docker has no image; set {SHOWN}.image=python:3.12-slim, or another with Python"
            )
        if self.sandbox == "remote" and not (self.url or "").startswith(("http://", "https://")):
            raise ConfigError(
                f"{SHOWN}.url={self.url} is not the address of a sandbox service (lockstep serve-sandbox); set "
                f"{SHOWN}.url=http://127.0.0.1:8200"
            )
        self._token()

    def _token(self) -> str | None:
        if self.token_env is None:
            return None
        token = os.environ.get(self.token_env)
        if not token:
            raise ConfigError(f"{SHOWN}.token_env={self.token_env} is not set in the environment; export it")
        return token

    async def open(self) -> Sandbox:
        """Open a sandbox. Raises `SandboxError`."""
        if self.sandbox == "remote":
            assert self.url is not None
            return await RemoteSandbox.open(self.url, self._token(), self.limits)
        if self.sandbox == "docker":
            program, image = self.docker_program or "docker", str(self.image)
            return await SessionSandbox.open(lambda: container_enclosure(program, image, self.limits))
        unsafe = bool(self.unsafe)
        return await SessionSandbox.open(
            lambda: local_enclosure(self.limits, unsafe=unsafe, setting=ENVIRONMENT_SETTING)
        )

    async def problem(self, languages: Sequence[Language]) -> str | None:
        """Return the reason why programs cannot run, in a sentence, or None; tried with one program per language."""
        if self.sandbox == "docker":
            problem = container_problem(self.docker_program or "docker", str(self.image))
            if problem is not None:
                return problem
        try:
            sandbox = await self.open()
            try:
                for language in languages:
                    timeout_s = min(TRIAL_TIMEOUT_S, self.limits.timeout_s)
                    result = await sandbox.run(language, TRIALS[language], timeout_s=timeout_s)
                    if result.stdout != "42\n":
                        return f"environment sandbox: {language} in sandbox={self.sandbox} ended with {result}"
            finally:
                await sandbox.close()
        except SandboxError as error:
            return f"environment sandbox: {error}"
        return None
