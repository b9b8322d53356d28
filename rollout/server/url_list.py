"""Addresses of the servers of a run: named, listed in a file, or behind a host name.

rollout.urls=[http://10.0.0.7:8000]     the server at this address
rollout.urls=[servers.txt]              an address per line, read again during the run; replace the file by renaming
rollout.urls=[dns://engines:8000]       every address of this host name, resolved again during the run
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from lockstep.rollout.errors import ConfigError, EngineError
from lockstep.rollout.system.addresses import is_watched, url_problem


def listed_urls(entries: Sequence[str]) -> list[str]:
    """Return the addresses that the entries of `rollout.urls` stand for now, each once.

    Raises `EngineError` if a file cannot be read or a name not be resolved now, `ConfigError` for a line of a file that
    is not an address.
    """
    urls = [url for entry in entries for url in (_current(entry) if is_watched(entry) else [entry])]
    return list(dict.fromkeys(url.rstrip("/") for url in urls))


def _current(entry: str) -> list[str]:
    if "://" in entry:
        return _resolved(entry)
    try:
        lines = Path(entry).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise EngineError(
            f"rollout.urls={entry} cannot be read: {error}; expected a file with an address per line"
        ) from error
    words = [line.partition("#")[0].strip() for line in lines]
    for number, word in enumerate(words, start=1):
        if word and (problem := url_problem(word)) is not None:
            raise ConfigError(f"line {number} of {entry}: {word} {problem}; expected http://<host>:<port>")
    return [word for word in words if word]


def _resolved(entry: str) -> list[str]:
    parts = urlsplit(entry)
    try:
        answers = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise EngineError(f"rollout.urls={entry}: {parts.hostname} cannot be resolved: {error}") from error
    hosts = sorted({str(address[0]) for *_, address in answers})
    return [f"http://[{host}]:{parts.port}" if ":" in host else f"http://{host}:{parts.port}" for host in hosts]
