"""HTTP to one vLLM server: what is retried, what is not, and the sentence for everything that can go wrong.

Retried, with growing pauses: a connection that is refused, reset or cut, and the answers 500, 502, 503 and 504. The
same request gives the same tokens (it carries its seed), and of an answer that broke off nothing is used. Not retried:
answers from 400 to 499, and anything that ran into its time limit, because whoever waits has waited long enough.
Calls that are not repeatable (weight updates) ask for one attempt.

aiohttp, because httpx costs 2 to 4 times the CPU per token.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt, wait_exponential_jitter

from rollout.errors import EngineError, EvidenceError, RequestError

ATTEMPTS = 5
"""With pauses of 0.2, 0.4, 0.8 and 1.6 s: longer than a hiccup, shorter than anybody's patience with a dead server."""
FIRST_PAUSE_S = 0.2
KEEP_ALIVE_S = 4.0
"""Shorter than the 5 s after which uvicorn closes an idle connection: none is used that is just being closed."""
RETRIED_STATUS = (500, 502, 503, 504)
SHOWN_CHARS = 400


class _Transient(Exception):
    """Worth another attempt; its text says what happened."""

    error = EngineError
    """What it becomes when the attempts are used up."""


class _Refused(EngineError):
    """The server answered, and not with what was asked for."""


class _Failed(_Transient):
    """The server is there, and says that it failed."""

    error = RequestError


class ServerClient:
    """Requests to one server. Make it in the event loop that uses it."""

    def __init__(self, url: str, *, api_key: str | None) -> None:
        self.url = url.rstrip("/")
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        # No limit on connections: as many requests are in flight as there are episodes.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
        # trust_env stays off: a proxy from the environment has no business between a trainer and its engines.
        self._session = aiohttp.ClientSession(headers=headers, connector=connector)

    async def get(self, path: str, *, timeout_s: float | None, attempts: int = ATTEMPTS) -> Any:
        return await self._request("GET", path, None, timeout_s=timeout_s, attempts=attempts)

    async def post(self, path: str, body: object = None, *, timeout_s: float | None, attempts: int = ATTEMPTS) -> Any:
        """The JSON of the answer; None if it is empty.

        Args:
            timeout_s: of one attempt; None: as long as it takes. An attempt that ran into it is not repeated.

        Raises:
            EngineError: the server cannot be reached, refuses, or takes too long.
            RequestError: it answered every attempt with a failure of its own.
            EvidenceError: the answer is not JSON.
        """
        return await self._request("POST", path, body, timeout_s=timeout_s, attempts=attempts)

    async def has(self, path: str, *, timeout_s: float) -> bool:
        """Whether the server knows this path."""
        try:
            await self.get(path, timeout_s=timeout_s)
        except _Refused:
            return False
        return True

    async def close(self) -> None:
        await self._session.close()

    async def _request(self, method: str, path: str, body: object, *, timeout_s: float | None, attempts: int) -> Any:
        data = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_Transient),
            stop=stop_after_attempt(attempts),
            wait=wait_exponential_jitter(multiplier=FIRST_PAUSE_S, jitter=FIRST_PAUSE_S / 4),
            retry_error_callback=self._gave_up,
        )
        return await retrying(self._attempt, method, path, data, timeout_s)

    async def _attempt(self, method: str, path: str, data: bytes | None, timeout_s: float | None) -> Any:
        try:
            async with self._session.request(
                method,
                self.url + path,
                data=data,
                headers={"Content-Type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=timeout_s),
            ) as response:
                raw = await response.read()
                status = response.status
        except TimeoutError:
            raise EngineError(
                f"{self.url}{path} gave no answer within {timeout_s:g} s: the server hangs or is overloaded"
            ) from None
        except aiohttp.InvalidURL:
            raise EngineError(f"{self.url} is no address of a server; expected http://<host>:<port>") from None
        except aiohttp.ClientError as error:  # refused, reset, closed, broken off in the body
            raise _Transient(str(error) or type(error).__name__) from error
        if status in RETRIED_STATUS:
            raise _Failed(f"HTTP {status}: {_text(raw)}")
        if status != 200:
            raise _Refused(f"{self.url}{path} refused: HTTP {status}: {_text(raw)}{_hint(status, path)}")
        return read_json(raw, source=self.url + path)

    def _gave_up(self, state: RetryCallState) -> Any:
        assert state.outcome is not None
        cause = state.outcome.exception()
        tried = "" if state.attempt_number == 1 else f" (tried {state.attempt_number} times)"
        assert isinstance(cause, _Transient)
        raise cause.error(
            f"{self.url} failed{tried}: {cause}; if the server is gone, look at its log, start it anew, and resume "
            "from the last checkpoint"
        ) from cause


def read_json(raw: bytes, *, source: str) -> Any:
    """The JSON of an answer; None if it is empty. Raises `EvidenceError` if it is something else."""
    if not raw:
        return None
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise EvidenceError(
            f"{source} answered {len(raw)} bytes that are not JSON ({error}): cut off by something in between, or no "
            "vLLM server"
        ) from error


def _text(raw: bytes) -> str:
    """What an error answer says, in one line: vLLM's message if there is one."""
    text = raw.decode("utf-8", errors="replace")
    try:
        error = json.loads(text)["error"]
        text = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    return " ".join(text.split())[:SHOWN_CHARS]


def _hint(status: int, path: str) -> str:
    if status in (401, 403):
        return "; put the server's key into the environment variable that rollout.api_key_env names"
    if status == 404 and path.startswith("/inference"):
        return "; start the server with --enable-scale-out (python scripts/serve_engine.py does)"
    if status == 404:
        return "; start the server with VLLM_SERVER_DEV_MODE=1 (python scripts/serve_engine.py does)"
    return ""


async def wait_until_healthy(client: ServerClient, *, timeout_s: float, every_s: float = 0.5) -> None:
    """Return when the server answers `/health`. Raises `EngineError` with the last failure after `timeout_s`."""
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + timeout_s
    while True:
        try:
            await client.get("/health", timeout_s=min(10.0, timeout_s), attempts=1)
            return
        except EngineError as error:
            if loop.time() >= give_up_at:
                raise EngineError(f"no server was ready at {client.url} within {timeout_s:g} s: {error}") from error
        await asyncio.sleep(every_s)
