"""Settings of one MCP server: a program on this machine, or an address."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.rollout.errors import ConfigError

NAME = re.compile(r"[A-Za-z0-9_-]{1,32}")
VARIABLE = re.compile(r"\$(\w+)")
SHOWN = "environment.settings.servers"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """One server; `command` or `url` is set."""

    name: str
    command: str | None = None
    """Program that speaks MCP on its standard input and output."""
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables beside PATH, HOME and the few others that MCP passes on. `$NAME` stands for one of this process."""
    cwd: str | None = None
    url: str | None = None
    """Address of a streamable HTTP server."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """HTTP headers, as a key. `$NAME` stands for an environment variable."""
    tools: Sequence[str] | None = None
    """Tools to offer; None: all."""

    @property
    def place(self) -> str:
        return f"{SHOWN}.{self.name}"

    def resolved(self, values: Mapping[str, str]) -> dict[str, str]:
        """Return values with environment variables filled in. Raises `ConfigError` if one is not set."""
        return {name: VARIABLE.sub(self._variable, value) for name, value in values.items()}

    def _variable(self, match: re.Match[str]) -> str:
        value = os.environ.get(match[1])
        if value is None:
            raise ConfigError(f"{self.place} reads the environment variable {match[1]}, which is not set; export it")
        return value


def read_servers(servers: Any) -> tuple[ServerSettings, ...]:
    """Return the settings of all servers by their names. Raises `ConfigError`: none, or one is wrong."""
    if not isinstance(servers, Mapping) or not servers:
        raise ConfigError(
            f"environment=mcp has no servers; set '{SHOWN}={{files: {{command: my_server, args: [--root, data]}}}}' or "
            f"'{SHOWN}={{search: {{url: \"http://127.0.0.1:8000/mcp\"}}}}'"
        )
    return tuple(_read(str(name), entry) for name, entry in servers.items())


def _read(name: str, given: Any) -> ServerSettings:
    place = f"{SHOWN}.{name}"
    if not NAME.fullmatch(name):
        raise ConfigError(f"{SHOWN}: the name {name!r} must consist of up to 32 letters, digits, _ and -")
    if not isinstance(given, Mapping):
        raise ConfigError(f"{place}={given!r:.80} is not a server; set {place}.command=<program>, or {place}.url=<url>")
    names = [entry.name for entry in dataclasses.fields(ServerSettings) if entry.name != "name"]
    for key in given:
        if key not in names:
            raise ConfigError(f"{place}.{key} is not a setting; set one of {', '.join(names)}")
    texts = {key: given.get(key) for key in ("command", "url", "cwd")}
    lists = {key: given.get(key) for key in ("args", "tools")}
    mappings: dict[str, Mapping[str, str]] = {key: given.get(key) or {} for key in ("env", "headers")}
    for key, value in texts.items():
        if value is not None and (not isinstance(value, str) or not value):
            raise ConfigError(f"{place}.{key}={value!r:.80} is not a text")
    for key, value in lists.items():
        if value is not None and not _is_texts(value):
            raise ConfigError(f"{place}.{key}={value!r:.80} is not a list of texts; quote numbers")
    for key, value in mappings.items():
        if not isinstance(value, Mapping) or not _is_texts([*value, *value.values()]):
            raise ConfigError(f"{place}.{key} is not a mapping of texts; quote numbers")
    settings = ServerSettings(
        name=name,
        command=texts["command"],
        url=texts["url"],
        cwd=texts["cwd"],
        args=tuple(lists["args"] or ()),
        tools=None if lists["tools"] is None else tuple(lists["tools"]),
        env=mappings["env"],
        headers=mappings["headers"],
    )
    if (settings.command is None) == (settings.url is None):
        raise ConfigError(
            f"{place} needs either a command or a url; set {place}.command=<program>, or {place}.url=<url>"
        )
    if settings.url is not None and not settings.url.startswith(("http://", "https://")):
        raise ConfigError(f"{place}.url={settings.url} is not an address; set it to http://<host>:<port>/mcp")
    if settings.command is not None and shutil.which(settings.command) is None:
        raise ConfigError(f"{place}.command={settings.command} is not a program that can be started; install it")
    return settings


def _is_texts(value: Any) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return is_list and all(isinstance(item, str) for item in value)
