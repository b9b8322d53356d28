"""Which address of this machine others can reach it by. Nothing here sends a packet, and nothing asks for a host name:
what a machine calls itself often resolves to loopback, where nobody else finds it."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

from rollout.errors import SyncError

LOOPBACK = "127.0.0.1"
ANY_PORT = 9
"""Of a UDP socket that is only asked which way it would send."""


def address_towards(host: str) -> str:
    """This machine's address on the interface that reaches `host`. Raises `SyncError` if no route leads there."""
    try:
        family, _, _, _, destination = socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(destination)
            return probe.getsockname()[0]
    except OSError as error:
        raise SyncError(f"no way from this machine to {host}: {error}; check rollout.urls") from error


def is_loopback(host: str) -> bool:
    """Whether a host name or address means the machine itself."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def rendezvous_address(hosts: Sequence[str]) -> str:
    """Where the workers on these hosts can meet this process: loopback only if all of them are on this machine."""
    elsewhere = [host for host in hosts if not is_loopback(host)]
    return address_towards(elsewhere[0]) if elsewhere else LOOPBACK
