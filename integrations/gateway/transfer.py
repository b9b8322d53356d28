"""Transfer of requests and answers in limited time, and the answers to requests that fail."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from lockstep.integrations.gateway.dialects import dialect_of
from lockstep.integrations.gateway.errors import CONVERSATION, ApiError, server_error
from lockstep.rollout.errors import ConfigError, TemplateError

log = logging.getLogger(__name__)

TRANSFER_S = 60.0
"""Time for the body of a request, and for the client to read the answer."""
IS_LAST = web.RequestKey("is_last", bool)
"""True if the connection of a request ends with its answer."""


@web.middleware
async def errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer every error in the form of the dialect, without internal details, in limited time."""
    response = await _answer(request, handler)
    if not response.prepared:
        await send(request, response)
    return response


async def read_body(request: web.Request) -> bytes:
    """Return the body of a request. Raises `ApiError` (408) if it is late."""
    try:
        async with asyncio.timeout(TRANSFER_S):
            return await request.read()
    except TimeoutError:
        raise ApiError(f"the body of the request did not arrive in {TRANSFER_S:g} s", status=408) from None


async def send(request: web.Request, response: web.StreamResponse) -> None:
    """Write a response. Raises `ConnectionError` if the client has disconnected, or does not read it in time."""
    if request.get(IS_LAST, False):
        response.force_close()
    try:
        async with asyncio.timeout(TRANSFER_S):
            await response.prepare(request)
            await response.write_eof()
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()  # a plain close would wait until the client reads what is already written
        raise ConnectionResetError(f"the client did not read its answer in {TRANSFER_S:g} s") from None


async def _answer(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        if (request.headers.get("Content-Encoding") or "identity").lower() != "identity":
            raise ApiError("Content-Encoding is not supported; send the body as it is", status=415)
        return await handler(request)
    except ApiError as error:
        return _error(request, error)
    except TemplateError as error:
        return _error(request, ApiError(str(error), param=CONVERSATION))
    except ConfigError as error:  # the chat template drops the tools
        return _error(request, ApiError(str(error), param="tools"))
    except web.HTTPRequestEntityTooLarge as error:
        return _error(request, ApiError(f"the request is too large: {error.text}", status=413))
    except web.HTTPException as error:
        text = f"invalid URL or method ({request.method} {request.path}): {error.reason}"
        return _error(request, ApiError(text, status=error.status))
    except web.RequestPayloadError:
        return _error(request, ApiError("the body of the request is not valid HTTP"))
    except ConnectionError:
        raise  # the client has disconnected
    except Exception:
        # The edge of the process: the client must get an answer without a traceback.
        log.exception("gateway: %s %s", request.method, request.raw_path)
        return _error(request, server_error("internal error of the gateway; see its log for details"))


def _error(request: web.Request, error: ApiError) -> web.Response:
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
    return web.json_response(dialect_of(request.path).error(error), status=error.status, headers=headers)
