"""Connections to MCP servers that limit what a server can do to this process.

Covered: a message longer than the limit ends the connection, before it is read to its end; compressed answers are
refused; the process group of a server is killed when its connection closes, and by the kernel when this process is
killed.
Not covered: a process that a server starts in a session of its own. Servers run with your rights, without a sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx2
from mcp.client.stdio import get_default_environment
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp.types import jsonrpc_message_adapter

from lockstep.integrations.tool_servers.server_settings import ServerSettings
from lockstep.rollout.hosts import bound_process
from lockstep.rollout.system.captured_output import OutputTail

CONNECT_S = 30.0
"""Time limit for connecting to an address [s]. Answers have the time limit of their call."""
EXIT_S = 2.0
"""Time for a server to end by itself after its input is closed [s]."""
MAX_UNREADABLE = 1000
"""Lines of a server's output that may be something else than messages."""


class TooLong(Exception):
    """A server sent a message beyond the limit."""


@asynccontextmanager
async def program(settings: ServerSettings, output: OutputTail, *, max_bytes: int) -> AsyncIterator[Any]:
    """Start a server and connect to its standard input and output. output: follows its standard error."""
    assert settings.command is not None
    (life, life_end), (errors, errors_end) = os.pipe(), os.pipe()
    output.follow(open(errors, "rb", buffering=0))  # noqa: SIM115  # it is closed by its reader
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", bound_process.__file__, str(life), settings.command, *settings.args),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors_end,
            env={**get_default_environment(), **settings.resolved(settings.env)},
            cwd=settings.cwd,
            pass_fds=(life,),
            start_new_session=True,
            limit=max_bytes,
        )
    except BaseException:
        os.close(life_end)
        raise
    finally:
        os.close(life)
        os.close(errors_end)
    incoming, read_stream = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    write_stream, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
    tasks = [
        asyncio.create_task(_read_lines(process, incoming, output)),
        asyncio.create_task(_write_lines(process, outgoing)),
    ]
    try:
        yield read_stream, write_stream
    finally:
        for stream in (read_stream, write_stream):
            stream.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await _end(process)
        os.close(life_end)


async def _read_lines(process: asyncio.subprocess.Process, incoming: Any, output: OutputTail) -> None:
    """Pass on the server's messages until its output ends, or a line is longer than the limit of its reader."""
    assert process.stdout is not None
    with contextlib.suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
        async with incoming:
            num_unreadable = 0
            try:
                while (line := await process.stdout.readline()) and num_unreadable < MAX_UNREADABLE:
                    try:
                        message = SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
                    except ValueError:
                        num_unreadable += 1  # a server that prints
                    else:
                        await incoming.send(message)
            except ValueError:  # of `readline`: the limit
                output.add(b"\nthe server wrote a line that is longer than the limit (max_message_mib)\n")
            _kill(process)


async def _write_lines(process: asyncio.subprocess.Process, outgoing: Any) -> None:
    assert process.stdin is not None
    async with outgoing:
        async for message in outgoing:
            text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
            process.stdin.write(text.encode() + b"\n")
            with contextlib.suppress(ConnectionError):  # the reader sees the end of the server
                await process.stdin.drain()


async def _end(process: asyncio.subprocess.Process) -> None:
    """Close the server's input, wait for its end, and kill what is left of its group."""
    assert process.stdin is not None
    process.stdin.close()
    for is_killed in (False, True):
        if is_killed:
            _kill(process)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EXIT_S):
                await asyncio.gather(_discard(process), process.wait())
                return


async def _discard(process: asyncio.subprocess.Process) -> None:
    """Read the rest of the output: asyncio sees the end of a process only after that of its pipes."""
    assert process.stdout is not None
    while await process.stdout.read(1 << 16):
        pass


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


@asynccontextmanager
async def address(settings: ServerSettings, *, max_bytes: int) -> AsyncIterator[Any]:
    """Connect to a streamable HTTP server."""
    assert settings.url is not None
    timeout = httpx2.Timeout(CONNECT_S, read=None)
    headers = {"Accept-Encoding": "identity", **settings.resolved(settings.headers)}
    async with (
        httpx2.AsyncClient(transport=_LimitedTransport(max_bytes), timeout=timeout, headers=headers) as client,
        streamable_http_client(settings.url, http_client=client, max_sse_event_size=max_bytes) as streams,
    ):
        yield streams


class _LimitedTransport(httpx2.AsyncHTTPTransport):
    """Transport whose answers end with `TooLong` beyond a limit; events of a stream are limited by MCP."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self._max_bytes = max_bytes

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.method == "DELETE":  # the end of the session; other answers have the limit of their call
            request.extensions["timeout"] = {**request.extensions["timeout"], "read": EXIT_S}
        response = await super().handle_async_request(request)
        if (encoding := response.headers.get("content-encoding", "identity").lower()) != "identity":
            await response.aclose()
            raise TooLong(f"an answer is compressed ({encoding:.20}), which was not asked for")
        if "text/event-stream" not in response.headers.get("content-type", ""):
            assert isinstance(response.stream, httpx2.AsyncByteStream)
            response.stream = _LimitedStream(response.stream, self._max_bytes)
        return response


class _LimitedStream(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream, max_bytes: int) -> None:
        self._stream = stream
        self._max_bytes = max_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        num_bytes = 0
        async for part in self._stream:
            num_bytes += len(part)
            if num_bytes > self._max_bytes:
                raise TooLong(f"an answer is longer than {self._max_bytes} bytes")
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()
