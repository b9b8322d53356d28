"""Reference server of remote sandboxes; the protocol is that of `remote_sandbox.py`.

Covered: a bearer token, which is never logged; limits that a client may lower and not raise; a maximum of sessions;
sessions that end when their client has sent nothing for a while, and when the server ends.
Not covered: encryption (put a proxy in front of it), fairness between clients.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from lockstep.rollout.errors import ConfigError, SandboxError
from lockstep.rollout.sandbox.execution import Language, Limits, Sandbox, read_object
from lockstep.rollout.sandbox.sandbox import PLACE_BYTES
from lockstep.rollout.system.addresses import is_loopback
from lockstep.rollout.system.captured_output import SILENT

MAX_REQUEST_BYTES = 2 * PLACE_BYTES
LOOK_S = 1.0
"""Pause between two looks for sessions whose client is gone."""


@dataclass(slots=True, kw_only=True)
class _Session:
    sandbox: Sandbox
    limits: Limits
    used: float
    """Time of the last request [s], by the monotonic clock."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held during a call."""


class SandboxService:
    """HTTP server of sandboxes. Use it in one event loop, between `start` and `close`."""

    def __init__(
        self,
        make: Callable[[Limits], Awaitable[Sandbox]],
        *,
        token: str | None,
        limits: Limits,
        max_sessions: int,
        idle_s: float,
    ) -> None:
        """make: opens a sandbox. token: None allows all clients. limits: the highest that a client may ask for."""
        self._make, self._token, self._limits = make, token, limits
        self._max_sessions, self._idle_s = max_sessions, idle_s
        self._sessions: dict[str, _Session] = {}
        self._num_opening = 0
        app = web.Application(client_max_size=MAX_REQUEST_BYTES, middlewares=[self._guard])
        app.router.add_post("/sessions", self._open)
        app.router.add_post("/sessions/{id}/calls", self._call)
        app.router.add_delete("/sessions/{id}", self._delete)
        self._runner = web.AppRunner(app, access_log=None, logger=SILENT, shutdown_timeout=1.0, auto_decompress=False)
        self._looks: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> str:
        """Listen and return the address. Raises `ConfigError`: others could reach it without a token."""
        if self._token is None and not is_loopback(host):
            raise ConfigError(
                f"a sandbox service on {host} without a token would run anyone's programs; set --token-env to the "
                "name of an environment variable with a token, or --host 127.0.0.1"
            )
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(f"port {port} of {host} cannot be used ({error.strerror}); set another --port") from error
        self._looks = asyncio.create_task(self._expire())
        return f"http://{host}:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        """Stop listening, and end all sessions."""
        if self._looks is not None:
            self._looks.cancel()
        await self._runner.cleanup()  # first, so that no session is opened meanwhile
        await asyncio.gather(*(self._end(name) for name in list(self._sessions)))

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        authorization = request.headers.get("Authorization", "")
        if self._token is not None and not hmac.compare_digest(
            authorization.encode(errors="surrogateescape"), f"Bearer {self._token}".encode()
        ):
            return _error(401, "expected Authorization: Bearer <token of this service>")
        try:
            return await handler(request)
        except (ValueError, KeyError, TypeError) as error:  # of JSON, of its fields, and ConfigError
            return _error(400, f"{type(error).__name__}: {error}")
        except web.HTTPException:
            raise
        except Exception as error:  # a SandboxError, or a fault of the service, which nothing else would tell
            return _error(500, str(error) or type(error).__name__)

    async def _open(self, request: web.Request) -> web.Response:
        values = read_object(await request.read())["limits"]
        limits = Limits(**values)
        for name, most in dataclasses.asdict(self._limits).items():
            if getattr(limits, name) > most:
                return _error(400, f"{name}={getattr(limits, name)} is above {most}, the limit of this service")
        if len(self._sessions) + self._num_opening >= self._max_sessions:
            return _error(503, f"all {self._max_sessions} sessions are taken")
        self._num_opening += 1
        try:
            sandbox = await self._make(limits)
        finally:
            self._num_opening -= 1
        name = secrets.token_hex(16)
        self._sessions[name] = _Session(sandbox=sandbox, limits=limits, used=time.monotonic())
        return web.json_response({"session": name}, status=201)

    async def _call(self, request: web.Request) -> web.Response:
        session = self._sessions.get(request.match_info["id"])
        body = read_object(await request.read())
        language, text, timeout_s = Language(body["language"]), body["text"], body["timeout_s"]
        if session is None:
            return _error(404, "no such session; it may have expired")
        if not isinstance(text, str) or isinstance(timeout_s, bool) or not 0 < timeout_s <= session.limits.timeout_s:
            return _error(400, f"expected a text and a timeout_s up to {session.limits.timeout_s}")
        async with session.turn:
            try:
                result = await session.sandbox.run(language, text, timeout_s=timeout_s)
            except SandboxError:
                await self._end(request.match_info["id"])
                raise
            finally:
                session.used = time.monotonic()
        return web.json_response(dataclasses.asdict(result))

    async def _delete(self, request: web.Request) -> web.Response:
        await self._end(request.match_info["id"])
        return web.Response(status=204)

    async def _end(self, name: str) -> None:
        """End a session, if it is still there."""
        session = self._sessions.pop(name, None)
        if session is not None:
            await session.sandbox.close()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            old = time.monotonic() - self._idle_s
            idle = [name for name, one in self._sessions.items() if one.used < old and not one.turn.locked()]
            await asyncio.gather(*(self._end(name) for name in idle))


def _error(status: int, text: str) -> web.Response:
    return web.json_response({"error": text}, status=status)
