"""Addresses of this machine: loopback, interfaces, and the rendezvous of a weight transfer."""

from __future__ import annotations

import socket

import pytest

from lockstep.rollout.errors import SyncError
from lockstep.rollout.system.addresses import address_towards, interface_of, is_loopback, rendezvous_address


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_loopback_is_recognized(host: str):
    assert is_loopback(host)


def test_the_rendezvous_is_on_the_address_that_reaches_a_remote_worker(monkeypatch: pytest.MonkeyPatch):
    assert rendezvous_address(["127.0.0.1", "localhost"]) == "127.0.0.1"
    monkeypatch.setattr("lockstep.rollout.system.addresses.address_towards", lambda host: f"towards {host}")
    assert rendezvous_address(["127.0.0.1", "10.0.0.7", "10.0.0.8"]) == "towards 10.0.0.7"


def fake_names(monkeypatch: pytest.MonkeyPatch, **addresses: str) -> None:
    """Resolve host names to these addresses; 10.* addresses are on other machines."""
    resolve = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *rest, **more: resolve(addresses.get(host, host), *rest, **more)
    )
    monkeypatch.setattr(
        "lockstep.rollout.system.addresses.address_towards",
        lambda host: "10.0.0.1" if addresses.get(host, host).startswith("10.") else address_towards(host),
    )


@pytest.mark.parametrize("leads_to", ["127.0.0.1", "127.0.1.1", "::1"])
def test_a_host_name_that_resolves_to_loopback_is_this_machine(monkeypatch: pytest.MonkeyPatch, leads_to: str):
    fake_names(monkeypatch, me=leads_to, there="10.0.0.7")
    assert rendezvous_address(["me"]) == "127.0.0.1"
    assert rendezvous_address(["me", "there"]) == rendezvous_address(["there", "me"]) == "10.0.0.1"


def test_the_address_is_that_of_the_interface_not_of_the_host_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(socket, "gethostname", lambda: pytest.fail("the host name may resolve to loopback"))
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert address_towards("::1") == "::1"
    with pytest.raises(SyncError, match=r"check rollout\.urls"):
        address_towards("no-such-host.invalid")


def test_an_interface_is_found_by_its_address():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.9") is None
