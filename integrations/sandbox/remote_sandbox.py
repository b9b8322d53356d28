"""Sandbox of a remote service, by three requests with JSON over HTTP. `sandbox_service.py` is a reference server.

    POST   <url>/sessions             {"limits": {...}}                 201 {"session": id}; 503: full, ask again
    POST   <url>/sessions/<id>/calls  {"language", "text", "timeout_s"} 200 the fields of `Execution`
    DELETE <url>/sessions/<id>                                          204

Each carries `Authorization: Bearer <token>` if there is a token. Errors have another status and {"error": text}; 404 is
a session that does not exist, or no longer. The service ends a session whose client sends nothing for a while.

Covered: deadlines, answers that are too long, no JSON or of wrong types, redirects (refused: they would get the token).
Not covered: what the service does with the programs; it is trusted. Encryption is that of an https address.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import aiohttp

from lockstep.rollout.errors import SandboxError
from lockstep.rollout.replies import limited_session, read_body
from lockstep.rollout.sandbox.execution import Execution, Language, Limits, read_execution, read_object

OPEN_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 30.0
"""Time for an answer beyond the time of the program."""
CLOSE_TIMEOUT_S = 5.0
RETRY_S = 0.5
"""Pause before another attempt at a service that is full."""
MAX_ANSWER_BYTES = 2**16
"""Longest answer, apart from the outputs of a program."""


class _Full(Exception):
    """The service has no place for another session."""


class RemoteSandbox:
    """`Sandbox` of a service. Use it in one event loop."""

    def __init__(self, url: str, token: str | None, limits: Limits) -> None:
        self._url, self._limits = f"{url.rstrip('/')}/sessions", limits
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        # Each request has its own limit on time.
        self._client = limited_session(headers, timeout=aiohttp.ClientTimeout(total=None))
        self._path: str | None = None

    @classmethod
    async def open(cls, url: str, token: str | None, limits: Limits) -> RemoteSandbox:
        """Open a session; a service that is full is asked again for a while. Raises `SandboxError`."""
        sandbox = cls(url, token, limits)
        try:
            await sandbox._begin()
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def _begin(self) -> None:
        deadline = asyncio.get_running_loop().time() + OPEN_TIMEOUT_S
        while True:
            try:
                answer = await self._ask("POST", "", {"limits": asdict(self._limits)}, timeout_s=OPEN_TIMEOUT_S)
                break
            except _Full as full:
                if asyncio.get_running_loop().time() > deadline:
                    raise SandboxError(f"sandbox service {self._url}: full for {OPEN_TIMEOUT_S:g} s") from full
                await asyncio.sleep(RETRY_S)
        session = answer.get("session")
        if not isinstance(session, str) or not session.isalnum() or len(session) > 64:
            raise SandboxError(
                f"sandbox service {self._url}: found session {session!r:.80}, expected letters and digits"
            )
        self._path = f"/{session}"

    async def run(self, language: Language, text: str, *, timeout_s: float) -> Execution:
        body = {"language": language.value, "text": text, "timeout_s": timeout_s}
        most = MAX_ANSWER_BYTES + 2 * 6 * self._limits.output_bytes
        answer = await self._ask(
            "POST", f"{self._path}/calls", body, timeout_s=timeout_s + ANSWER_TIMEOUT_S, max_bytes=most
        )
        try:
            return read_execution(answer)
        except ValueError as error:
            raise SandboxError(f"sandbox service {self._url}: {error}") from error

    async def close(self) -> None:
        path, self._path = self._path, None
        try:
            if path is not None:
                with suppress(SandboxError, _Full):  # the service ends it later
                    await self._ask("DELETE", path, None, timeout_s=CLOSE_TIMEOUT_S)
        finally:
            await self._client.close()

    async def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, timeout_s: float,
        max_bytes: int = MAX_ANSWER_BYTES,
    ) -> dict[str, Any]:  # fmt: skip
        """Return the JSON object of an answer. Raises `SandboxError`, and `_Full`."""
        where = f"sandbox service {self._url}"
        try:
            async with asyncio.timeout(timeout_s):
                async with self._client.request(method, self._url + path, json=body, allow_redirects=False) as response:
                    text = await read_body(response, max_bytes)
        except TimeoutError as error:
            raise SandboxError(f"{where}: no answer to {method} in {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise SandboxError(f"{where}: {type(error).__name__}: {error}") from error
        if response.status == 503:
            raise _Full
        if response.status == 204:
            return {}
        try:
            answer = read_object(text)
        except ValueError as error:
            raise SandboxError(f"{where}: status {response.status}, {error}") from error
        if response.status not in (200, 201):
            raise SandboxError(f"{where}: status {response.status}: {str(answer.get('error'))[:400]}")
        return answer
