"""Connection to one MCP server for the whole process: its tools, listed once, and calls of them from any event loop.

A server that has died, or whose connection was closed because it lied, is connected again by the next call.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import json
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from lockstep.integrations.tool_servers.server_settings import ServerSettings
from lockstep.rollout.chat.tool_functions import Content
from lockstep.rollout.errors import ConfigError, TemplateError, ToolServerError
from lockstep.rollout.hosts.foreign_schemas import MAX_TOOLS, read_tools
from lockstep.rollout.safe_text import error_text, safe_text, without_addresses
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.rollout.system.captured_output import OutputTail

T = TypeVar("T")
LOG_CHARS = 500
"""End of a server's standard error that an error quotes."""
END_S = 10.0
"""Time for one server to end [s]."""
CLOSE_S = 15.0
"""Time for all servers to end with the process [s]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    start_timeout_s: float
    """For the start of a server and the list of its tools."""
    max_message_bytes: int
    """Longest message of a server."""


class ToolCallError(Exception):
    """The tool itself reports that the call failed."""


class ToolServer:
    """One server. Its coroutines run in the loop of the process for servers."""

    def __init__(self, settings: ServerSettings, limits: Limits, loop: BackgroundLoop) -> None:
        self.settings = settings
        self._limits = limits
        self._loop = loop
        self._lock = asyncio.Lock()
        self._output = OutputTail()
        self._task: asyncio.Task[None] | None = None
        self._client: Any = None
        self._schemas: list[Mapping[str, Any]] | None = None

    async def schemas(self) -> list[Mapping[str, Any]]:
        """Return the tools in the OpenAI form; the server is asked once.

        Raises `ConfigError` if it cannot be reached, or lists tools that cannot be used.
        """
        return await self._from_other_loop(self._list)

    async def call(self, name: str, arguments: Mapping[str, Any], *, with_images: bool = False) -> Content:
        """Call a tool and return its result as the content of a message, with its images if these are wanted.

        Raises `ToolCallError` with the text of a tool that reports an error, `ToolServerError` if the server is gone or
        its answer cannot be used. The caller limits the time: canceled, it cancels the request.
        """
        return await self._from_other_loop(functools.partial(self._call, name, arguments, with_images))

    async def close(self) -> None:
        """End the connection and the server's process, within `END_S`. Closing twice is allowed."""
        task, self._task, self._client = self._task, None, None
        for _ in range(2):  # the second time, a server that does not answer to the end of its session is left alone
            if task is not None and not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=END_S / 2)

    async def _from_other_loop(self, work: Callable[[], Awaitable[T]]) -> T:
        return await asyncio.wrap_future(self._loop.submit(_awaited(work)))

    async def _list(self) -> list[Mapping[str, Any]]:
        async with self._lock:
            if self._schemas is None:
                where = f"MCP server {self.settings.name}"
                try:
                    async with asyncio.timeout(self._limits.start_timeout_s):
                        client = await self._connected()
                        self._schemas = await self._checked(await _all_tools(client))
                except TimeoutError:
                    await self.close()
                    raise ConfigError(
                        f"{where} did not list its tools in {self._limits.start_timeout_s:g} s{self._stderr_end()}; "
                        "raise environment.settings.start_timeout_s"
                    ) from None
                except ConfigError:
                    await self.close()
                    raise
                except Exception as error:  # of the package, the transport, or a server's answer
                    await self.close()
                    raise ConfigError(f"{where} cannot be used: {_reason(error)}{self._stderr_end()}") from error
            return self._schemas

    async def _call(self, name: str, arguments: Mapping[str, Any], with_images: bool) -> Content:
        from mcp import MCPError

        client = None
        try:
            async with self._lock:
                client = await self._connected()
            result = await client.session.call_tool(name, dict(arguments))
            if with_images:
                content = await asyncio.to_thread(result_content, result, with_images=True)
            else:
                content = result_content(result)
        except (ToolCallError, ToolServerError):
            raise
        except MCPError as error:
            ending = self._stderr_end() if await self._is_closed(error, client) else ""
            raise ToolServerError(f"server {self.settings.name}: {_reason(error)}{ending}") from error
        except Exception as error:  # a result of wrong types, a broken connection
            raise ToolServerError(
                f"server {self.settings.name}: its answer cannot be used: {_reason(error)}"
            ) from error
        return content

    async def _is_closed(self, error: Any, client: Any) -> bool:
        """Return True if the other side has closed the connection; then the next call connects again."""
        from mcp.types import CONNECTION_CLOSED

        if error.code != CONNECTION_CLOSED:
            return False
        if self._client is client:  # else another call has connected again
            await self.close()
        return True

    async def _connected(self) -> Any:
        """Return the client; connect if there is none, or its connection has ended."""
        if self._client is not None and self._task is not None and not self._task.done():
            return self._client
        await self.close()
        ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._serve(ready))
        try:
            self._client = await ready
        except asyncio.CancelledError:
            await self.close()
            raise
        return self._client

    async def _serve(self, ready: asyncio.Future[Any]) -> None:
        """Hold the connection until the task is canceled: its contexts must end in the task that began them."""
        from mcp import Client

        from lockstep.integrations.tool_servers.limited_transports import address, program

        settings, limit = self.settings, self._limits.max_message_bytes
        if settings.url is None:
            transport = program(settings, self._output, max_bytes=limit)
        else:
            transport = address(settings, max_bytes=limit)
        try:
            async with Client(transport, cache=None) as client:
                ready.set_result(client)
                await asyncio.Event().wait()
        except Exception as error:
            if ready.done():
                return  # requests in flight were told by the client
            ready.set_exception(error)

    async def _checked(self, tools: list[Any]) -> list[Mapping[str, Any]]:
        wanted_names, name = self.settings.tools, self.settings.name
        names = [tool.name for tool in tools]
        for missing in sorted(set(wanted_names or ()) - set(names)):
            raise ConfigError(
                f"{self.settings.place}.tools names {missing!r}; server {name} lists {', '.join(names) or 'no tools'}"
            )
        offered_tools = [tool for tool in tools if wanted_names is None or tool.name in wanted_names]
        if not offered_tools:
            raise ConfigError(f"MCP server {name} lists no tools; expected at least one")
        try:
            return await read_tools([(tool.name, tool.description, tool.input_schema) for tool in offered_tools])
        except ToolServerError as error:
            place = f"{self.settings.place}.tools"
            raise ConfigError(f"MCP server {name}: {error}; leave it out with {place}=[<others>]") from error

    def _stderr_end(self) -> str:
        """Return the end of the server's standard error as the end of a sentence."""
        text = self._output.text(wait_s=0.2)[-LOG_CHARS:]  # it has just ended
        return f"; its last output: {safe_text(text)}" if text else ""


def result_content(result: Any, *, with_images: bool = False) -> Content:
    """Return the result of a call as the content of a message: a text, or parts if there are images.

    Raises `ToolCallError` if the tool reports an error, `ToolServerError` if it has nothing to read, or an image that
    cannot be read.
    """
    from mcp.types import EmbeddedResource, ImageContent, TextContent, TextResourceContents

    parts: list[dict[str, Any]] = []
    others: list[str] = []
    for block in result.content:
        if isinstance(block, TextContent):
            _add_text(parts, block.text)
        elif isinstance(block, EmbeddedResource) and isinstance(block.resource, TextResourceContents):
            _add_text(parts, block.resource.text)
        elif with_images and not result.is_error and isinstance(block, ImageContent):
            parts.append({"type": "image", "image": _read_image(block.data)})
        else:
            others.append(block.type)
    if result.is_error:
        raise ToolCallError("".join(part.get("text", "") for part in parts) or "the tool failed without a text")
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    if others:
        kinds, readable = " and ".join(sorted(set(others))), "text and images" if with_images else "text"
        if not parts:
            raise ToolServerError(f"the tool returned {kinds}, and only {readable} can be read")
        _add_text(parts, f"[left out: {kinds}; only {readable} can be read]")
    if all("text" in part for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _add_text(parts: list[dict[str, Any]], text: str) -> None:
    """Add a text, on a line of its own."""
    is_first = not parts or "text" not in parts[-1]
    parts.append({"type": "text", "text": text if is_first else f"\n{text}"})


def _read_image(data: str) -> Any:
    """Return an image of a result, decoded: a damaged one is a fault of the server. Raises `ToolServerError`."""
    from lockstep.rollout.media.image_files import read_image  # with PIL, for models that see images

    try:
        return read_image({"type": "image", "image": f"data:;base64,{data}"}, "the tool returned an image")
    except TemplateError as error:
        raise ToolServerError(without_addresses(str(error))) from error


async def _awaited(work: Callable[[], Awaitable[T]]) -> T:
    return await work()


async def _all_tools(client: Any) -> list[Any]:
    """Return the tools of all pages."""
    from mcp.types import PaginatedRequestParams

    tools, cursor, pages = [], None, 0
    while cursor is not None or not pages:
        params = None if cursor is None else PaginatedRequestParams(cursor=cursor)
        page = await client.session.list_tools(params=params)
        tools += page.tools
        cursor, pages = page.next_cursor, pages + 1
        if pages > MAX_TOOLS:
            raise ValueError(f"its list of tools has more than {MAX_TOOLS} pages")
    return tools


def _reason(error: BaseException) -> str:
    """Return an error in a sentence; the first one of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = " ".join(error_text(error).split())
    return f"{type(error).__name__}: {text}"[:LOG_CHARS]


_servers: dict[str, ToolServer] = {}
"""All servers of this process, by their settings."""
_creation = threading.Lock()


@functools.cache
def _loop() -> BackgroundLoop:
    """Return the loop of the servers; at exit of the interpreter they are closed, then the loop."""
    loop = BackgroundLoop()
    atexit.register(close_servers)
    return loop


def tool_server(settings: ServerSettings, limits: Limits) -> ToolServer:
    """Return the server with these settings; it is started by its first use."""
    key = repr((settings, limits))
    with _creation:  # episodes in threads may ask at once
        if key not in _servers:
            _servers[key] = ToolServer(settings, limits, _loop())
    return _servers[key]


def close_servers() -> None:
    """End all servers of this process. They can be used again, and are then started again."""
    servers = list(_servers.values())
    _servers.clear()

    async def close() -> None:
        await asyncio.gather(*(server.close() for server in servers), return_exceptions=True)

    with contextlib.suppress(TimeoutError):
        _loop().run(close(), timeout=CLOSE_S)
