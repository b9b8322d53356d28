"""Environment `mcp`: the tools of MCP servers, until the model answers without a tool call.

    lockstep train environment=mcp 'environment.settings.servers={files: {command: my_server}}' ...

Covered: programs that speak MCP on standard input and output, and streamable HTTP servers, with the `mcp` package;
tools are listed once, arguments are checked against their schema, and each call has a time limit. A server that dies,
sends wrong types or too much, or never answers costs the call an error that the model reads, and no more.
Images of a result are read by a model that sees images, and left out for others.
Not covered: resources, prompts, sampling and questions of servers; sound. All episodes share a server, so what it
keeps, they share. Servers run with your rights.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

from lockstep.integrations.tool_servers.server_settings import read_servers
from lockstep.integrations.tool_servers.tool_server import Limits, ToolServer, tool_server
from lockstep.rollout.chat.messages import Tools
from lockstep.rollout.chat.tool_functions import Content
from lockstep.rollout.environments.declaration import Declaration
from lockstep.rollout.environments.prompt import PromptReader
from lockstep.rollout.environments.toolbox import ReadyTool, Toolbox, count_results
from lockstep.rollout.episode.environment import Step
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.hosts.foreign_schemas import refuse_wrong, schema_text
from lockstep.rollout.records import Message


class McpEnvironment:
    """Runs tools of servers until the model answers without a call; the episode limits the number of turns."""

    declaration = Declaration(reads="prompt", max_turns=8, opens="tool servers", is_deterministic=False)

    def __init__(
        self,
        *,
        servers: Any = None,
        tool_timeout_s: float = 30.0,
        start_timeout_s: float = 60.0,
        max_result_chars: int = 8192,
        max_message_mib: float = 4.0,
        prompt_column: str | None = None,
        system_prompt: str | None = None,
    ):
        """servers: settings by name (`ServerSettings`). tool_timeout_s, max_result_chars: of the `Toolbox`.
        start_timeout_s: for a server to start and list its tools. max_message_mib: longest message of a server.

        Raises `ConfigError`: the `mcp` package is not installed, or a setting is wrong.
        """
        if find_spec("mcp") is None:
            raise ConfigError("environment=mcp needs the mcp package; type: pip install 'mcp>=2.3,<3'")
        if not tool_timeout_s > 0 or not start_timeout_s > 0 or not max_message_mib > 0 or max_result_chars < 1:
            raise ConfigError(
                f"environment mcp: found tool_timeout_s={tool_timeout_s}, start_timeout_s={start_timeout_s}, "
                f"max_message_mib={max_message_mib}, max_result_chars={max_result_chars}; set each above 0"
            )
        limits = Limits(start_timeout_s=start_timeout_s, max_message_bytes=int(max_message_mib * 2**20))
        self._servers = [tool_server(settings, limits) for settings in read_servers(servers)]
        self._make_toolbox = partial(Toolbox, (), timeout_s=tool_timeout_s, max_result_chars=max_result_chars)
        self._prompt = PromptReader(column=prompt_column, system=system_prompt)
        self._toolbox: Toolbox | None = None
        self.sees_images = False

    @property
    def tools(self) -> Tools:
        return () if self._toolbox is None else self._toolbox.schemas

    def read_row(self, example: Mapping[str, Any]) -> Sequence[Message]:
        return self._prompt.messages(example)

    async def reset(self, example: Mapping[str, Any]) -> Sequence[Message]:
        """Return the row's prompt. Raises `ConfigError` if a server cannot be used, or two have a tool of one name."""
        schema_lists = await asyncio.gather(*(server.schemas() for server in self._servers))
        names = Counter(schema["function"]["name"] for schemas in schema_lists for schema in schemas)
        name, count = names.most_common(1)[0]
        if count > 1:
            raise ConfigError(
                f"{count} MCP tools are named {name!r}; leave out all but one with environment.settings.servers.<name>"
                ".tools=[...]"
            )
        ready = [
            ReadyTool(schema=schema, call=partial(self._call, server, schema["function"]["name"], schema_text(schema)))
            for server, schemas in zip(self._servers, schema_lists, strict=True)
            for schema in schemas
        ]
        self._toolbox = self._make_toolbox(ready=ready)
        return self.read_row(example)

    async def step(self, message: Message) -> Step:
        assert self._toolbox is not None, "reset comes first"
        results = await self._toolbox.answer(message, sees_images=self.sees_images)
        return Step(
            messages=tuple(result.message for result in results), done=not results, outcome=count_results(results)
        )

    async def _call(self, server: ToolServer, name: str, schema: str, arguments: Mapping[str, Any]) -> Content:
        await refuse_wrong(schema, arguments)
        return await server.call(name, arguments, with_images=self.sees_images)
