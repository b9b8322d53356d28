"""Rendezvous address and port of a weight sync. The sync itself: tests/integration/test_sync.py."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.rollout.errors import ConfigError, SyncError
from lockstep.rollout.weights.sync import WeightSync
from lockstep.rollout.weights.vllm_transport import connect, free_port
from tests.unit.rollout.system.test_addresses import fake_names


def rendezvous_of(address: str | None, hosts: list[str]) -> str:
    sync = WeightSync.__new__(WeightSync)  # without engines
    sync._address = address
    return sync._address_for(hosts)


def test_a_loopback_address_is_refused_only_for_engines_on_other_machines(monkeypatch: pytest.MonkeyPatch):
    fake_names(monkeypatch, me="127.0.1.1", there="10.0.0.7")
    for address in (None, "127.0.0.1"):
        assert rendezvous_of(address, ["me", "127.0.0.1"]) == "127.0.0.1"
    assert rendezvous_of(None, ["me", "there"]) == "10.0.0.1"
    with pytest.raises(
        ConfigError, match=r"sync\.address=127\.0\.0\.1 .* there, .*=null, which uses 10\.0\.0\.1 for it"
    ):
        rendezvous_of("127.0.0.1", ["me", "there"])


def test_a_configured_address_is_used_without_resolving_names(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("the name must not be resolved"))
    assert rendezvous_of("10.0.0.1", ["there"]) == "10.0.0.1"


def test_a_port_for_nccl_needs_an_ipv4_address():
    assert free_port("127.0.0.1") > 0
    with pytest.raises(ConfigError, match=r"IPv4 address of this machine, found ::1 .*gloo"):
        free_port("::1")


def test_vllms_process_group_refuses_ipv6():
    """If this fails, `free_port` can accept IPv6 addresses."""
    from vllm.distributed.utils import StatelessProcessGroup

    with pytest.raises(OSError, match="Address family"):
        StatelessProcessGroup.create("::1", 0, rank=0, world_size=1)


def test_a_server_on_the_trainers_gpu_is_explained(monkeypatch: pytest.MonkeyPatch):
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

    def refuse(init_info: object, client: object, source: object) -> None:
        raise RuntimeError("NCCL error: invalid usage (run with NCCL_DEBUG=WARN for details)")

    monkeypatch.setattr(WeightTransferTrainerFactory, "trainer_init", refuse)
    engines: Any = SimpleNamespace(hosts=["10.0.0.7"], num_workers=1)
    with pytest.raises(SyncError, match=r"with 10\.0\.0\.7 .*invalid usage.*CUDA_VISIBLE_DEVICES"):
        connect("nccl", engines, None, address_for=lambda hosts: "127.0.0.1", buffer_bytes=1)  # type: ignore[arg-type]
