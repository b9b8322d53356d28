"""Replies of other programs within limits of size, depth and numbers: judges, search and tool servers, hosts, models.

Bodies arrive as they are, never decompressed: 1.5 MiB of gzip can be 3 GiB. The limit on time is the caller's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn, SupportsFloat

import aiohttp

MAX_DEPTH = 100
"""Levels of nesting, far below those at which Python's recursion ends."""
MAX_NUMBER = 1e100
"""Largest absolute value of a number: its square is finite, and so is the sum of any number of them."""
CHUNK_BYTES = 2**16


def limited_session(headers: Mapping[str, str] | None = None, **options: Any) -> aiohttp.ClientSession:
    """Return a session that asks for answers without compression, and never decompresses one."""
    request_headers = {"Accept-Encoding": "identity", **(headers or {})}
    return aiohttp.ClientSession(headers=request_headers, auto_decompress=False, **options)


async def read_body(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Return the body of an answer of `limited_session`, as it arrives. Raises `ValueError` beyond the limit."""
    parts, size = [], 0
    async for part in response.content.iter_chunked(CHUNK_BYTES):
        parts.append(part)
        size += len(part)
        if size > max_bytes:
            raise ValueError(f"an answer of more than {max_bytes} bytes")
    return b"".join(parts)


def read_json(raw: str | bytes, *, is_finite: bool = True) -> Any:
    """Return a JSON value. Raises `ValueError` for anything else, and depth beyond `MAX_DEPTH`.

    is_finite: refuse NaN and infinities, also those of numbers such as 1e400.
    """
    checks: dict[str, Any] = {"parse_constant": refuse_constant, "parse_float": _finite} if is_finite else {}
    try:
        value = json.loads(raw, **checks)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if depth_of(value) > MAX_DEPTH:
        raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
    return value


def read_number(value: Any) -> float:
    """Return a number as a float. Raises `ValueError` if it is not a number, not finite, or beyond `MAX_NUMBER`."""
    if not isinstance(value, SupportsFloat):
        raise ValueError(f"found {type(value).__name__}, expected a number")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError("found an integer that does not fit a float, expected a finite number") from None
    except Exception as error:  # of a tensor of several numbers, of a user's class
        raise ValueError(
            f"found {type(value).__name__}, which cannot be read as a number ({type(error).__name__})"
        ) from None
    if not abs(number) <= MAX_NUMBER:
        raise ValueError(f"found {number}, expected a finite number up to {MAX_NUMBER:g}")
    return number


def refuse_constant(text: str) -> NoReturn:
    """Refuse NaN and Infinity, which Python's parser would accept (its `parse_constant`)."""
    raise ValueError(f"{text} is not JSON")


def depth_of(value: object) -> int:
    """Count the levels of nesting of a JSON value, without recursion."""
    depth, level = 0, [value]
    while level:
        depth += 1
        containers = [item for item in level if isinstance(item, (dict, list))]
        level = [item for c in containers for item in (c.values() if isinstance(c, dict) else c)]
    return depth


def with_null(value: Any) -> Any:
    """Return a value with null for NaN and infinity, which Python writes and reads as JSON, but which JSON lacks."""
    if isinstance(value, dict):
        return {key: with_null(item) for key, item in value.items()}
    if isinstance(value, list):
        return [with_null(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"the number {text:.40} is too large")
    return number
