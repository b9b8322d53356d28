"""A server and a rank of the trainer on another host: a network namespace with its own address and loopback.

The machine's name does not resolve there. Tests are skipped without the right to make namespaces (root, `ip`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.rollout.errors import SyncError
from lockstep.rollout.weights.sync import WeightSync
from tests.fixtures.models import perturb
from tests.fixtures.remote import save_model, trained
from tests.fixtures.servers import EngineServer, running
from tests.fixtures.sockets import is_loopback, listening
from tests.integration.test_launch_files import check, finish, free_port, launch

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

HERE, THERE = "10.213.77.1", "10.213.77.2"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture(scope="module")
def other_host() -> Iterator[list[str]]:
    """A command that runs its arguments on the other host."""
    name, outside, inside = f"lockstep{os.getpid()}", f"ls{os.getpid()}a", f"ls{os.getpid()}b"
    if shutil.which("ip") is None:
        pytest.skip("needs `ip` to make a network namespace")
    try:
        ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"may not make a network namespace: {error.stderr.decode().strip()}")
    try:
        ip("link", "add", outside, "type", "veth", "peer", "name", inside, "netns", name)
        ip("addr", "add", f"{HERE}/24", "dev", outside)
        ip("link", "set", outside, "up")
        for words in (["addr", "add", f"{THERE}/24", "dev", inside], ["link", "set", inside, "up"]):
            ip("-n", name, *words)
        ip("-n", name, "link", "set", "lo", "up")
        yield ["ip", "netns", "exec", name]
    finally:
        ip("netns", "del", name)  # also deletes the pair of interfaces


@pytest.fixture(scope="module")
def server(other_host: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    directory = tmp_path_factory.mktemp("host")
    with running(save_model(directory / "model"), directory, host=THERE, within=other_host) as (server,):
        yield server


def test_weights_reach_the_other_host_and_only_its_network_is_opened(server: EngineServer):
    with trained([server]) as remote:
        perturb(remote.model, seed=1)
        remote.push()
        call = remote.generate(tuple(range(10, 180)))
        assert remote.mismatch(call) < 1e-4
        opened = {address for address, _ in listening() if not is_loopback(address)}
        assert opened == {HERE}


def test_a_loopback_address_for_another_host_is_refused(server: EngineServer):
    with trained([server]) as remote, pytest.raises(SyncError, match=r"set sync\.address=null"):
        WeightSync(module=remote.model, engines=remote.engines, address="127.0.0.1", deadline_s=10)


def test_the_other_host_has_other_addresses(other_host: list[str], tmp_path: Path):
    assert "UP" in subprocess.run([*other_host, "ip", "link"], capture_output=True, text=True).stdout
    listed = subprocess.run([*other_host, "ip", "-4", "addr"], capture_output=True, text=True).stdout
    assert THERE in listed
    assert HERE not in listed


def test_ranks_on_two_hosts_make_one_update(other_host: list[str], tmp_path: Path):
    """By default gloo listens where the name of the machine resolves: on loopback, on both hosts."""
    options = ["--num_processes", "2", "--main_process_ip", HERE, "--main_process_port", str(free_port())]
    machines = [
        launch(tmp_path, "multi_node", *options, "--machine_rank", rank, within=within)
        for rank, within in (("1", other_host), ("0", []))
    ]
    finish(*machines)
    check(tmp_path, num_ranks=2, zero_stage=3)
