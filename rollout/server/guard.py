"""API key check for all routes of a vLLM server except `/health`.

vLLM 0.32's own key guards only `/v1` and `/inference`. Its other routes can replace weights and call worker methods by
name, so a server that other machines reach needs this middleware:

    VLLM_API_KEY=... vllm serve MODEL --middleware lockstep.rollout.server.guard.RequireKey ...

Covered: all routes and websockets; the key is compared in constant time. Not covered: TLS (vLLM has `--ssl-keyfile`),
rate limits, and malicious clients that hold the key.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

KEY_ENV = "VLLM_API_KEY"
"""Also read by vLLM's own guard."""
OPEN_PATHS = ("/health",)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class RequireKey:
    """ASGI middleware. Raises `RuntimeError` when the server starts without a key."""

    def __init__(self, app: App) -> None:
        key = os.environ.get(KEY_ENV)
        if not key:
            raise RuntimeError(
                f"lockstep.rollout.server.guard.RequireKey needs a key in the environment variable {KEY_ENV}"
            )
        self._app = app
        self._expected = _digest(f"Bearer {key}".encode())

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or scope["path"] in OPEN_PATHS or self._has_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await reply(
                send, 401, {"error": "expected the header `Authorization: Bearer <key>` with the key of this server"}
            )

    def _has_key(self, scope: Message) -> bool:
        authorization = next((value for name, value in scope["headers"] if name.lower() == b"authorization"), b"")
        return hmac.compare_digest(_digest(authorization), self._expected)


async def reply(send: Send, status: int, body: dict[str, Any]) -> None:
    """Send a JSON response."""
    raw = json.dumps(body, separators=(",", ":")).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": raw})


def _digest(value: bytes) -> bytes:
    """Hash to a fixed length, so that the comparison does not reveal the key's length."""
    return hashlib.sha256(value).digest()
