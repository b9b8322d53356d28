"""Which address of this machine others can reach it by. Nothing here sends a packet, and nothing asks what the machine
calls itself: that name often resolves to loopback, where nobody else finds it."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Sequence

from rollout.errors import SyncError

LOOPBACK = "127.0.0.1"
ANY_PORT = 9
"""Of a UDP socket that is only asked which way it would send."""
SIOCGIFADDR = 0x8915
"""Linux's request for the IPv4 address of an interface (netdevice(7))."""


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
    """Whether this is the machine itself, by an address of loopback or as `localhost`. Resolves no other name."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def rendezvous_address(hosts: Sequence[str]) -> str:
    """Where the workers on these hosts can meet this process: loopback only if all of them are on this machine.

    A host that a name leads to over loopback is this machine, too: its own name often does. Raises `SyncError` if no
    route leads to a host.
    """
    own_addresses = (address_towards(host) for host in hosts if not is_loopback(host))
    return next((address for address in own_addresses if not is_loopback(address)), LOOPBACK)


def interface_of(address: str) -> str | None:
    """Name of this machine's interface with this IPv4 address; None if it is no interface's first one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has no IPv4 address
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return None
