"""Machines that do not reach each other; they are threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import TCPStore

from lockstep.rollout.errors import TrainingError
from lockstep.trainer.distributed import machines
from lockstep.trainer.distributed.machines import refuse_unreachable


def met(*interfaces: str | None) -> list[str]:
    """Return what each machine says, which has this interface for gloo."""
    store = TCPStore("127.0.0.1", 0, is_master=True)
    common = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GROUP_WORLD_SIZE": str(len(interfaces)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
    }

    def one(machine: int) -> str:
        interface = interfaces[machine]
        own = {} if interface is None else {"GLOO_SOCKET_IFNAME": interface}
        try:
            refuse_unreachable({**common, **own, "GROUP_RANK": str(machine)})
        except TrainingError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(interfaces)) as pool:
        return list(pool.map(one, range(len(interfaces))))


@pytest.mark.parametrize("second", ["lo", "lo,eth9", "", None])
def test_machines_that_reach_each_other_go_on(second: str | None) -> None:
    """Where no interface is chosen, gloo chooses an address that is not known here."""
    assert met("lo", second, "lo") == ["", "", ""]


def test_a_missing_interface_is_named_on_all_machines() -> None:
    first, *others = met("lo", "ib7", "lo")
    assert others == [first, first]
    assert first.count("by GLOO_SOCKET_IFNAME=ib7 of {'lo': '127.0.0.1'") == 3
    assert first.count("}: no such interface. ") == 3
    assert "Set GLOO_SOCKET_IFNAME on each machine" in first


def test_an_interface_that_leads_nowhere_is_named_on_all_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "address_of", lambda name: "127.0.0.1")
    monkeypatch.setattr(machines.socket, "create_connection", _refuses)
    first, second = met("lo", "lo")
    assert first == second
    assert "by GLOO_SOCKET_IFNAME=lo of {'lo': '127.0.0.1'" in first
    assert "}: No route to host. " in first


def test_a_launcher_without_a_store_is_left_to_torch() -> None:
    refuse_unreachable({"GROUP_WORLD_SIZE": "2", "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})


def _refuses(address: tuple[str, int], timeout: float) -> None:
    raise OSError("No route to host")
