"""Addresses of the servers of a run: named, listed in a file, or behind a host name.

rollout.urls=[http://10.0.0.7:8000]     the server at this address
rollout.urls=[servers.txt]              an address per line, read again during the run; replace the file by renaming
rollout.urls=[dns://engines:8000]       every address of this host name, resolved again during the run
"""

from __future__ import annotations

import os.path
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from lockstep.rollout.errors import ConfigError, EngineError
from lockstep.rollout.system.addresses import is_loopback

DNS = "dns"
"""Scheme of a host name that stands for all its addresses."""
EXAMPLE = "[http://127.0.0.1:8000]"


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


def is_watched(entry: str) -> bool:
    """True for an entry whose servers may change during a run: a file or a host name."""
    return "://" not in entry or urlsplit(entry).scheme == DNS


def url_problem(url: str, schemes: Sequence[str] = ("http", "https")) -> str | None:
    """Return what is wrong with the address of a server; None if nothing is."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"cannot be read ({error})"
    if parts.scheme not in schemes or not parts.hostname:
        return "is not an http(s) address"
    if port is None:
        return "has no port"
    if parts.path.strip("/") or parts.query or parts.fragment:
        return "has more than host and port"
    if parts.username or parts.password:
        return "has a user or a password, which would be logged; keys belong in the environment"
    return None


def server_problems(urls: Sequence[str], *, drivers: int | None, address: str | None) -> Iterator[str]:
    """Yield one sentence per conflict between `rollout.urls`, `rollout.drivers` and `sync.address`."""
    watched = list(filter(is_watched, urls))
    if watched and (drivers or 1) > 1:
        yield (
            f"rollout.drivers={drivers} have fixed shares of named servers, and {watched[0]} in rollout.urls stands "
            "for changing ones; set rollout.drivers=1, or name all servers"
        )
    elif (drivers or 0) > len(urls):
        yield (
            f"rollout.drivers={drivers} have a server each at least, and rollout.urls has {len(urls)}; set "
            f"rollout.drivers={len(urls)} or less"
        )
    yield from url_problems("rollout.urls", [entry for entry in urls if not is_watched(entry)])
    yield from _list_problems(urls)
    if address is not None:
        yield from _address_problems(address, urls)


def url_problems(name: str, urls: Sequence[str]) -> Iterator[str]:
    """Yield one sentence per invalid or repeated address of a server. name: of the setting."""
    for url in urls:
        if (problem := url_problem(url)) is not None:
            yield f"{name}: {url} {problem}; expected http://<host>:<port>, as in {name}={EXAMPLE}"
    plain = [url.rstrip("/") for url in urls]
    twice = sorted({url for url in plain if plain.count(url) > 1})
    if twice:
        yield f"{name} names {', '.join(twice)} twice, expected every server once; set {name} without it"


def _list_problems(entries: Sequence[str]) -> Iterator[str]:
    """Yield one sentence per entry of rollout.urls that is neither an address, nor a file or a host name of them."""
    for entry in filter(is_watched, entries):
        if "://" in entry and (problem := url_problem(entry, schemes=[DNS])) is not None:
            yield f"rollout.urls: {entry} {problem}; expected dns://<host>:<port>"
        elif "://" not in entry and not os.path.isfile(entry):
            yield (
                f"rollout.urls: {entry} is neither an address nor a file; expected http://<host>:<port>, "
                "dns://<host>:<port>, or a file with an address per line"
            )


def _address_problems(address: str, urls: Sequence[str]) -> Iterator[str]:
    elsewhere = [url for url in urls if url_problem(url) is None and not is_loopback(urlsplit(url).hostname or "")]
    if is_loopback(address) and elsewhere:
        yield (
            f"sync.address={address} is loopback, where {elsewhere[0]} cannot fetch weights; set sync.address=null for "
            "the address that reaches it"
        )
