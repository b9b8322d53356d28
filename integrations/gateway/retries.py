"""Recognition of requests that a client sends again, so that one answer is sampled, counted and trained once.

    client                                                the request again
    goes away while the answer is sampled or written      is a new one: nothing was recorded
    goes away after the answer was written, and retries   gets the recorded answer (SDK header, or Idempotency-Key)
    uses an Idempotency-Key twice                         gets the recorded answer, or 409 while it is sampled

OpenAI's client libraries number their attempts in `x-stainless-retry-count`. Equal requests without these headers are
separate samples, as an agent wants them that asks several times. Not covered: a client that goes away after its answer
was written, and never retries; the answer is recorded.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.integrations.gateway.completion import Completion
from lockstep.integrations.gateway.errors import ApiError

MAX_REMEMBERED = 256


@dataclass(slots=True)
class _Attempt:
    body: bytes
    """Digest of the path and the body."""
    transport: asyncio.BaseTransport | None
    completion: Completion | None = None
    """None while it is sampled."""


class Retries:
    """The last requests of one session."""

    def __init__(self) -> None:
        self._attempts: OrderedDict[str | bytes, _Attempt] = OrderedDict()

    def find(self, headers: Mapping[str, str], path: str, body: bytes) -> Completion | None:
        """Return the recorded answer to a repeated request; None if it must be sampled.

        Raises `ApiError`: 409 if the first is still being sampled, 422 if it had another body.
        """
        digest = _digest(path, body)
        earlier = self._attempts.get(_key(headers, digest))
        if earlier is None:
            return None
        key = headers.get("Idempotency-Key")
        if key is None:
            was_lost = earlier.transport is None or earlier.transport.is_closing()
            return earlier.completion if was_lost and _is_retry(headers) else None
        if earlier.body != digest:
            raise ApiError("this Idempotency-Key was used for another request; use a new key for each", status=422)
        if earlier.completion is None:
            raise ApiError("the request with this Idempotency-Key is still being answered; retry later", status=409)
        return earlier.completion

    def begin(
        self, headers: Mapping[str, str], path: str, body: bytes, transport: asyncio.BaseTransport | None
    ) -> str | bytes:
        """Remember a request before it is sampled; return its key for `end`."""
        digest = _digest(path, body)
        key = _key(headers, digest)
        self._attempts[key] = _Attempt(digest, transport)
        self._attempts.move_to_end(key)
        if len(self._attempts) > MAX_REMEMBERED:
            self._attempts.popitem(last=False)
        return key

    def end(self, key: str | bytes, completion: Completion | None) -> None:
        """Remember the answer; None: there is none."""
        if completion is None:
            self._attempts.pop(key, None)
        elif key in self._attempts:
            self._attempts[key].completion = completion

    def forget(self, completion: Completion) -> None:
        """Forget an answer that did not reach the client."""
        for key, attempt in list(self._attempts.items()):
            if attempt.completion is completion:
                del self._attempts[key]


def _key(headers: Mapping[str, str], digest: bytes) -> str | bytes:
    return headers.get("Idempotency-Key", digest)


def _is_retry(headers: Mapping[str, str]) -> bool:
    return headers.get("x-stainless-retry-count", "0") != "0"


def _digest(path: str, body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16, person=path.encode()[:16]).digest()
