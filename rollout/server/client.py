"""HTTP client of one vLLM server: retries, time limits and error messages.

Retried with growing pauses: refused, reset or cut connections, and statuses 500, 502, 503 and 504. A retried request
carries its seed, so it gives the same tokens. Not retried: statuses 400 to 499, and requests that exceeded their time
limit. Calls that cannot be repeated (weight updates) are sent once. httpx would cost 2 to 4 times the CPU per token.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt, wait_exponential_jitter

from lockstep.rollout.errors import EngineError, EngineLostError, EvidenceError, RefusedError, RequestError
from lockstep.rollout.replies import limited_session, read_body

ATTEMPTS = 5
"""With pauses of 0.2, 0.4, 0.8 and 1.6 s: longer than a short disturbance, and a dead server is reported in seconds."""
FIRST_PAUSE_S = 0.2
KEEP_ALIVE_S = 4.0
"""Shorter than the 5 s after which uvicorn closes an idle connection, so that no closing connection is reused."""
RETRIED_STATUS = (500, 502, 503, 504)
SHOWN_CHARS = 400
MAX_ANSWER_BYTES = 2**30
"""Size limit of an answer. A context of a million tokens is 140 MB in vLLM's own form, without a support."""


class _Transient(Exception):
    """A failure that is retried. args: the cause, and the type of error after the last attempt."""


class ServerClient:
    """Requests to one server. Create it in the event loop that uses it."""

    def __init__(self, url: str, *, api_key: str | None) -> None:
        self.url = url.rstrip("/")
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        # Unlimited connections: every episode has a request in flight.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
        # trust_env stays off: no proxy between a trainer and its engines.
        self._session = limited_session(headers, connector=connector)

    async def get(self, path: str, *, timeout_s: float | None, attempts: int = ATTEMPTS) -> Any:
        return await self._request("GET", path, None, timeout_s=timeout_s, attempts=attempts)

    async def post(self, path: str, body: object = None, *, timeout_s: float | None, attempts: int = ATTEMPTS) -> Any:
        """Return the JSON of the answer; None if it is empty. timeout_s: limit of one attempt; None: no limit.

        Raises `EngineLostError` if the server is unreachable, `EngineError` if it refuses or exceeds the limit,
        `RequestError` if it failed on every attempt, `EvidenceError` for an answer that is not JSON.
        """
        return await self._request("POST", path, body, timeout_s=timeout_s, attempts=attempts)

    async def has_route(self, path: str, *, timeout_s: float) -> bool:
        try:
            await self.get(path, timeout_s=timeout_s)
        except RefusedError:
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
            retry_error_callback=self._raise_last_failure,
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
                allow_redirects=False,  # prompts and weights go to the named server only
            ) as response:
                raw = await read_body(response, MAX_ANSWER_BYTES)
                status = response.status
        except TimeoutError:
            raise EngineError(
                f"{self.url}{path} gave no answer within {timeout_s:g} s: the server hangs or is overloaded"
            ) from None
        except aiohttp.InvalidURL:
            raise EngineError(f"found {self.url}, expected the address of a server: http://<host>:<port>") from None
        except ValueError as error:
            raise EvidenceError(f"{self.url}{path}: {error}; expected a vLLM server; check the address") from error
        except aiohttp.ClientError as error:  # refused, reset, closed, or cut in the body
            raise _Transient(str(error) or type(error).__name__, EngineLostError) from error
        if status in RETRIED_STATUS:
            raise _Transient(f"HTTP {status}: {_error_text(raw)}", RequestError)
        if status != 200:
            raise RefusedError(f"{self.url}{path} refused: HTTP {status}: {_error_text(raw)}{_hint(status, path)}")
        return read_json(raw, source=self.url + path)

    def _raise_last_failure(self, state: RetryCallState) -> Any:
        assert state.outcome is not None
        failure = state.outcome.exception()
        assert isinstance(failure, _Transient)
        cause, kind = failure.args
        tries = "" if state.attempt_number == 1 else f" (tried {state.attempt_number} times)"
        raise kind(
            f"{self.url} failed{tries}: {cause}; if the server is gone, read its log, restart it, and resume from the "
            "last checkpoint"
        ) from failure


def read_json(raw: bytes, *, source: str) -> Any:
    """Return the JSON of an answer; None if it is empty. Raises `EvidenceError` for anything else."""
    if not raw:
        return None
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise EvidenceError(
            f"{source} answered {len(raw)} bytes that are not JSON ({error}), expected a vLLM server; check the "
            "address, and proxies that may cut answers"
        ) from error


def _error_text(raw: bytes) -> str:
    """Return an error answer on one line: vLLM's message if it has one."""
    text = raw.decode("utf-8", errors="replace")
    try:
        error = json.loads(text)["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    return " ".join(text.split())[:SHOWN_CHARS]


def _hint(status: int, path: str) -> str:
    if 300 <= status < 400:
        return "; redirects are not followed: name the address of the server itself in rollout.urls or teacher.urls"
    if status in (403, 404) and path.startswith("/inference"):  # vLLM's answers without the flag
        return "; start the server with --enable-scale-out (lockstep serve-engine does)"
    if status in (401, 403):
        return "; put the server's key into the variable that rollout.api_key_env or teacher.api_key_env names"
    if status == 404:
        return "; start the server with VLLM_SERVER_DEV_MODE=1 (lockstep serve-engine does)"
    return ""


async def wait_until_healthy(client: ServerClient, *, timeout_s: float, every_s: float = 0.5) -> None:
    """Wait until the server answers `/health`. Raises `EngineError` with the last failure after `timeout_s`."""
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
