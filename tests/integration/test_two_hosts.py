"""Runs on two hosts that sample from a third, and what their faults look like.

The hosts are network namespaces (`tests/fixtures/hosts.py`), on which the name of a host resolves to loopback. Tests
are skipped without the right to make namespaces (root, `ip`).
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from lockstep.rollout.errors import SyncError
from lockstep.rollout.weights.sync import WeightSync
from tests.fixtures.forked_python import forked_python
from tests.fixtures.forked_servers import ForkedServers
from tests.fixtures.hosts import DEAD_END, DOMAIN, Host, hosts
from tests.fixtures.kills import differences
from tests.fixtures.models import perturb
from tests.fixtures.remote import save_model, trained
from tests.fixtures.runs import check_run, environment_of, run_directory, settings_of
from tests.fixtures.servers import EngineServer, running
from tests.fixtures.sockets import is_loopback, listening
from tests.integration.test_launch_files import check, finish, free_port, launch

pytestmark = [pytest.mark.engine, pytest.mark.distributed, pytest.mark.timeout(600)]

HERE = "10.213.77.254"
LIMIT_S = 200
STEP_S = 20
ON_HOSTS = ["--config_file", "configs/accelerate/multi_node.yaml", "--num_machines", "2", "--num_processes", "2"]
ON_ONE = ["--config_file", "configs/accelerate/zero3.yaml", "--num_processes", "2"]


@pytest.fixture(scope="module")
def network() -> Iterator[list[Host]]:
    with hosts(3, own_address=HERE) as made:
        yield made


@pytest.fixture(scope="module")
def servers(network: list[Host], forked_servers: ForkedServers) -> Iterator[list[EngineServer]]:
    """Two servers on the third host, so that each host of trainers drives one."""
    started = [forked_servers.start(port, network[2]) for port in (8000, 8001)]
    for server in started:
        server.wait_until_ready()
    yield started
    for server in started:
        server.stop()


@dataclass
class Launched:
    """A run with a launcher and a rank on each of two hosts."""

    launchers: list[subprocess.Popen[bytes]]
    directory: Path

    def said(self, machine: int) -> str:
        return (self.directory / f"host-{machine}.log").read_text()

    def wait_for_updates(self, count: int) -> None:
        metrics = run_directory(self.directory) / "metrics.jsonl"
        while not metrics.exists() or metrics.read_text().count("reward/mean") < count:
            assert all(launcher.poll() is None for launcher in self.launchers), self.said(0) + self.said(1)
            time.sleep(0.02)

    def statuses(self) -> list[int]:
        return [launcher.wait(timeout=LIMIT_S) for launcher in self.launchers]


class Runs:
    """Starts runs on the first two hosts that sample from the third; ends what is left of them."""

    def __init__(self, network: list[Host], servers: list[EngineServer], model: Path, root: Path) -> None:
        self.hosts = network[:2]
        self._urls = [server.url for server in servers]
        self._model, self._root = model, root

    def start(
        self,
        name: str,
        changes: Mapping[str, object] | None = None,
        *,
        alone: bool = False,
        first: str | None = None,
        meets_within_s: int = 600,
        **second: str,
    ) -> Launched:
        """Start a run.

        Args:
            alone: both ranks on the first host.
            first: address of the first host for the second one, where it is wrong.
            meets_within_s: time in which the launchers meet [s].
            second: environment variables of the second host.
        """
        directory, python = self._root / name, forked_python()
        directory.mkdir()
        settings = settings_of(self._urls, self._model, directory, **(changes or {}))
        launchers = []
        for machine, host in enumerate(self.hosts[:1] if alone else self.hosts):
            address = first if first and machine else self.hosts[0].address
            place = ["--main_process_ip", address, "--machine_rank", str(machine)]
            place += ["--rdzv_conf", f"timeout={meets_within_s}"]
            options = ON_ONE if alone else [*ON_HOSTS, *place]
            words = [python, "-m", "accelerate.commands.launch", *options, "scripts/train.py", *settings]
            environment = environment_of(python) | (second if machine else {})
            launchers.append(host.start(words, directory / f"host-{machine}.log", environment))
        return Launched(launchers, directory)

    def end(self) -> None:
        for host in self.hosts:
            host.kill()


@pytest.fixture
def runs(
    network: list[Host], servers: list[EngineServer], forked_servers: ForkedServers, tmp_path: Path
) -> Iterator[Runs]:
    started = Runs(network, servers, forked_servers.model, tmp_path)
    yield started
    started.end()


def sentence(said: str) -> str:
    """Return the last error that the program printed."""
    return [line for line in said.splitlines() if line.startswith("lockstep: ") and "Error: " in line][-1]


def test_two_hosts_train_the_same_bits_as_one(runs: Runs) -> None:
    """On two hosts each drives one of the servers; on one host the first rank drives both."""
    two = runs.start("two")
    assert two.statuses() == [0, 0], two.said(0) + two.said(1)
    check_run(run_directory(two.directory), updates=2)
    one = runs.start("one", alone=True)
    assert one.statuses() == [0], one.said(0)
    found = differences(run_directory(one.directory), run_directory(two.directory))
    assert [line for line in found if "user_files.json" not in line] == []  # names the folder of its own run


def test_a_killed_host_ends_the_run_on_the_other(runs: Runs) -> None:
    run = runs.start("killed", {"updates": 500})
    run.wait_for_updates(1)
    runs.hosts[1].kill()
    assert run.statuses()[0] == 1
    assert f"rank 0: the connection to a rank at {runs.hosts[1].address} is lost" in sentence(run.said(0))
    again = f"--num_machines 2 --machine_rank $NODE_RANK --main_process_ip {runs.hosts[0].address} -m lockstep train"
    assert again in " ".join(run.said(0).split())


def test_an_unreachable_host_ends_the_run_at_the_limit_of_a_step(runs: Runs) -> None:
    run = runs.start("unplugged", {"updates": 500, "step_timeout_s": STEP_S, "on_step_timeout": "end"})
    run.wait_for_updates(1)
    with runs.hosts[1].unplugged():
        assert 0 not in run.statuses()
    for machine in range(2):
        assert f"has taken {STEP_S} s, so the run ends" in run.said(machine)
        assert "Raise step_timeout_s" in run.said(machine)
        stacks = run_directory(run.directory) / "logs" / f"stacks-rank-{machine}.txt"
        assert "distributed" in stacks.read_text()


def test_a_wrong_interface_is_named_on_both_hosts(runs: Runs) -> None:
    run = runs.start("interface", GLOO_SOCKET_IFNAME=DEAD_END)
    assert run.statuses() == [1, 1]
    for machine in range(2):
        said = sentence(run.said(machine))
        assert f"lockstep-0 cannot reach lockstep-1 by GLOO_SOCKET_IFNAME={DEAD_END} of " in said
        assert f"'eth0': '{runs.hosts[1].address}'" in said
        assert "[Errno 101] Network is unreachable" in said
        assert "Set GLOO_SOCKET_IFNAME" in said


@pytest.mark.slow
def test_a_wrong_address_of_the_first_host_is_named_by_the_launchers(runs: Runs) -> None:
    """Ranks do not start, so this is torch's error."""
    run = runs.start("address", first="10.213.77.99", meets_within_s=15)
    assert 0 not in run.statuses()
    assert "Timed out after 16 seconds waiting for clients. 1/2 clients joined" in run.said(0)
    assert "failed to connect to any network address of (10.213.77.99, 29500)" in run.said(1)


# A rank and a server on another host, while this process is the trainer


@pytest.fixture(scope="module")
def server(network: list[Host], tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    directory, host = tmp_path_factory.mktemp("host"), network[2]
    with running(save_model(directory / "model"), directory, host=host.address, within=host.within) as (server,):
        yield server


@pytest.mark.slow
def test_weights_reach_the_other_host_and_only_its_network_is_opened(server: EngineServer) -> None:
    with trained([server]) as remote:
        perturb(remote.model, seed=1)
        remote.push()
        call = remote.generate(tuple(range(10, 180)))
        assert remote.mismatch(call) < 1e-4
        opened = {address for address, _ in listening() if not is_loopback(address)}
        assert opened == {HERE}


@pytest.mark.slow
def test_a_loopback_address_for_another_host_is_refused(server: EngineServer) -> None:
    with trained([server]) as remote, pytest.raises(SyncError, match=r"set sync\.address=null"):
        WeightSync(module=remote.model, engines=remote.engines, address="127.0.0.1", deadline_s=10)


def test_a_host_has_addresses_and_a_name_of_its_own(network: list[Host]) -> None:
    def on_host(*words: str) -> str:
        return subprocess.run([*network[1].within, *words], capture_output=True, text=True, check=True).stdout

    listed = on_host("ip", "-4", "addr")
    assert network[1].address in listed
    assert HERE not in listed
    assert on_host("hostname").strip() == network[1].name
    names = [network[1].name, f"{network[0].name}.{DOMAIN}"]
    code = f"import socket; print(socket.gethostname(), *map(socket.gethostbyname, {names}))"
    assert on_host(forked_python(), "-c", code).split() == [network[1].name, "127.0.1.1", network[0].address]


@pytest.mark.slow
def test_ranks_on_two_hosts_make_one_update(network: list[Host], tmp_path: Path) -> None:
    """By default gloo listens where the name of the machine resolves: on loopback, on both hosts."""
    options = ["--num_processes", "2", "--main_process_ip", HERE, "--main_process_port", str(free_port())]
    machines: list[subprocess.Popen[str]] = [
        launch(tmp_path, "multi_node", *options, "--machine_rank", rank, within=within)
        for rank, within in (("1", network[0].within), ("0", []))
    ]
    finish(*machines)
    check(tmp_path, num_ranks=2, zero_stage=3)
