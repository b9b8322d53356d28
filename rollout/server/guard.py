"""The lock on a vLLM server: every route but `/health` asks for the key.

vLLM 0.32's own key guards `/v1` and `/inference` alone. Behind its other routes are weights that can be replaced and
methods of its workers that can be called by name, so a server that trainers on other machines reach needs this:

    VLLM_API_KEY=... vllm serve MODEL --middleware rollout.server.guard.RequireKey ...

Covered: all routes, websockets too; the key is compared in constant time. Not covered: TLS (vLLM has `--ssl-keyfile`),
rate limits, and clients that hold the key and mean harm.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

KEY_ENV = "VLLM_API_KEY"
"""Read by vLLM's own guard, too."""
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
            raise RuntimeError(f"rollout.server.guard.RequireKey needs a key in the environment variable {KEY_ENV}")
        self._app = app
        self._expected = _digest(f"Bearer {key}".encode())

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or scope["path"] in OPEN_PATHS or self._has_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            body = b'{"error": "expected the header `Authorization: Bearer <key>` with the key of this server"}'
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    def _has_key(self, scope: Message) -> bool:
        presented = next((value for name, value in scope["headers"] if name.lower() == b"authorization"), b"")
        return hmac.compare_digest(_digest(presented), self._expected)


def _digest(value: bytes) -> bytes:
    """Of one length, so that the comparison says nothing about the key's."""
    return hashlib.sha256(value).digest()
