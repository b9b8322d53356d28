"""Addresses of this machine as others reach it, found without the host name, which often resolves to loopback."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Sequence

from lockstep.rollout.errors import SyncError

LOOPBACK = "127.0.0.1"
ANY_PORT = 9
"""Port of a UDP socket that is connected to read its route; nothing is sent."""
SIOCGIFADDR = 0x8915
"""Linux request for the IPv4 address of an interface (netdevice(7))."""


def address_towards(host: str) -> str:
    """Return this machine's address on the interface that reaches `host`. Raises `SyncError` without a route."""
    try:
        family, _, _, _, destination = socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(destination)
            return probe.getsockname()[0]
    except OSError as error:
        raise SyncError(f"no route from this machine to {host}: {error}; check rollout.urls") from error


def is_loopback(host: str) -> bool:
    """Return True for a loopback address and for `localhost`. Resolves no other name."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def rendezvous_address(hosts: Sequence[str]) -> str:
    """Return the address where workers on these hosts reach this process: loopback only if all are on this machine.

    A host name that resolves to loopback is this machine: its own name often does. Raises `SyncError` without a route
    to a host.
    """
    own_addresses = (address_towards(host) for host in hosts if not is_loopback(host))
    return next((address for address in own_addresses if not is_loopback(address)), LOOPBACK)


def interface_of(address: str) -> str | None:
    """Return the name of the interface whose first IPv4 address this is, or None."""
    return next((name for _, name in socket.if_nameindex() if address_of(name) == address), None)


def address_of(interface: str) -> str | None:
    """Return the first IPv4 address of an interface, or None."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            reply = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", interface.encode()))
        except OSError:
            return None
    return socket.inet_ntoa(reply[20:24])
