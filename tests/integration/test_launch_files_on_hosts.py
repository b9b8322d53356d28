"""The launch files of clusters on two or four hosts: their lines run as they stand, and train.

Each host is a network namespace with one slot instead of eight GPUs. The test is the platform: it sets the variables,
passes signals, and mounts the shared directory. Only the task is another one: the programs that the lines start take
the model, data and reward of this test in place of the file's. Tests are skipped without the right to make namespaces.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.forked_python import forked_python
from tests.fixtures.hosts import Host, hosts
from tests.fixtures.processes import wait_until_gone
from tests.fixtures.remote import save_model
from tests.fixtures.runs import PATHS, check_run, settings_of
from tests.fixtures.servers import KEY, KEY_ENV
from tests.unit.project.test_launching import PLATFORMS, SERVERS
from tests.unit.project.test_slurm import SCRIPT

pytestmark = [pytest.mark.engine, pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(900)]

LIMIT_S = 300
SHARED = "/runs"
"""Directory that all nodes share, in the files."""
TASK = ("experiment", "model.path", "model.dtype", "rollout.max_model_len", "data", "environment", "reward")
"""Settings of the files that say what is trained, and on how much memory."""
PLACE = ("run_root", "run_name", "rollout", "rollout.urls")
"""Settings that the files choose themselves."""

STAND_IN = """#!{executable}
import os, sys
words = [word for word in sys.argv[1:] if word.partition("=")[0] not in {task}]
words = [word.replace("={shared}", "={runs}", 1) if word.startswith("run_root=") else word for word in words]
os.execv({python!r}, [{python!r}, *{before}, *words, *{settings}])
"""
"""A program of the environment: it starts a fork, with another task than that of the file."""

SLURM = """#!{executable}
import os, subprocess, sys
from itertools import takewhile
hosts = {hosts}
name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
if name == "scontrol":
    assert words == ["show", "hostnames", "lockstep-[0-3]"], words
    print(*hosts, sep="\\n")
    sys.exit()
options = dict(word[2:].partition("=")[::2] for word in takewhile(lambda word: word.startswith("--"), words))
nodes = options["nodelist"].split(",")
assert len(nodes) == int(options["nodes"]) == int(options["ntasks"]) and "overlap" in options, options
command = words[len(options):]
variables = [
    dict(os.environ, SLURM_PROCID=str(i), SLURM_NTASKS=str(len(nodes)), SLURM_NODEID=str(i)) for i in range(len(nodes))
]
if len(nodes) == 1:
    os.execvpe(hosts[nodes[0]][0], [*hosts[nodes[0]], *command], variables[0])
steps = [subprocess.Popen([*hosts[node], *command], env=own) for node, own in zip(nodes, variables)]
sys.exit(max(step.wait() for step in steps))
"""
"""srun and scontrol: a step on each of the nodes, from the first of which they are called."""


class Cluster:
    """Hosts with an environment of programs, on which the lines of a launch file run."""

    def __init__(self, made: list[Host], directory: Path, *, colocated: bool) -> None:
        self.hosts, self.directory = made, directory
        self.runs = directory / "runs"
        self.runs.mkdir()
        self.programs = directory / "environment" / "bin"
        self.programs.mkdir(parents=True)
        settings = settings_of([], save_model(directory / "model"), directory, updates=1)
        settings = [word for word in settings if word.partition("=")[0] not in PLACE]
        settings += ["rollout.kv_cache_gib=0.0625", *(["rollout=colocated"] if colocated else [])]
        # The command of a server replaces its process by `sys.executable`.
        run = f"import runpy, sys; sys.executable = {forked_python()!r}; del sys.argv[0]"
        run += "; runpy.run_path(sys.argv[0], None, '__main__')"
        self.program("python", STAND_IN, before=["-c", run], settings=settings)
        launcher = ["-m", "accelerate.commands.accelerate_cli"]
        self.program("accelerate", STAND_IN, before=launcher, settings=settings)

    def program(self, name: str, text: str, **values: object) -> None:
        known = {"executable": sys.executable, "python": forked_python(), "task": TASK, "shared": SHARED}
        path = self.programs / name
        path.write_text(text.format(**known, runs=self.runs, **values))
        path.chmod(0o755)

    def start(self, rank: int, line: list[str], variables: dict[str, str], **more: str) -> subprocess.Popen[bytes]:
        own = {"VENV": str(self.programs.parent), "PYTHON_EXEC": forked_python(), "PYTHONPATH": PATHS}
        own |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        given = {name: value.replace(SHARED, str(self.runs), 1) for name, value in variables.items()}
        return self.hosts[rank].start(line, self.log(rank), {**os.environ, **own, **given, **more})

    def log(self, rank: int) -> Path:
        return self.directory / f"node-{rank}.log"

    def said(self) -> str:
        logs = [self.log(rank) for rank in range(len(self.hosts))]
        return "\n".join(f"{log.name}:\n{log.read_text()[-3000:]}" for log in logs if log.exists())

    def check(self, name: str) -> None:
        check_run(self.runs / name, updates=1)
        assert "2 rank(s), ZeRO stage 3" in self.log(0).read_text()
        beats = [json.loads(path.read_text()) for path in (self.runs / name / "heartbeat").iterdir()]
        assert {beat["rank"] for beat in beats} == {0, 1}


@pytest.fixture
def network(request: pytest.FixtureRequest) -> Iterator[list[Host]]:
    with hosts(request.param) as made:
        yield made


def wait_for(trainers: list[subprocess.Popen[bytes]], servers: list[subprocess.Popen[bytes]], cluster: Cluster) -> None:
    """Wait until the trainers have ended well, while no server ends."""
    deadline = time.monotonic() + LIMIT_S
    while any(node.poll() is None for node in trainers):
        assert time.monotonic() < deadline, cluster.said()
        assert not any(node.poll() for node in trainers), cluster.said()
        assert all(node.poll() is None for node in servers) or trainers[0].poll() == 0, cluster.said()
        time.sleep(0.1)
    assert [node.returncode for node in trainers] == [0, 0], cluster.said()


@pytest.mark.parametrize(
    ("platform", "topology", "network"),
    [(platform, topology, 2 + SERVERS[topology]) for platform in PLATFORMS for topology in SERVERS],
    indirect=["network"],
)
def test_the_nodes_of_a_file_train(platform: str, topology: str, network: list[Host], tmp_path: Path) -> None:
    cluster = Cluster(network, tmp_path, colocated=topology == "colocated")
    addresses = "\n".join(host.address for host in network)
    nodes = []
    for rank in range(len(network)):
        line, variables = PLATFORMS[platform](topology, rank)
        size = {  # of this cluster; the names are in `variables` already, but for the secret
            "kubernetes": {"GPUS": "1"},
            "skypilot": {"SKYPILOT_NODE_IPS": addresses, "SKYPILOT_NUM_GPUS_PER_NODE": "1"},
            "dstack": {"DSTACK_NODES_IPS": addresses, "DSTACK_GPUS_PER_NODE": "1"},
        }[platform]
        assert size.keys() <= variables.keys()
        nodes.append(cluster.start(rank, line, variables, **size, **{KEY_ENV: KEY}))
    trainers, servers = nodes[:2], nodes[2:]
    wait_for(trainers, servers, cluster)
    for server in servers:
        if platform != "skypilot":  # there they end by themselves
            server.terminate()
        server.wait(timeout=LIMIT_S)
    cluster.check("dapo" if topology == "colocated" else "gsm8k")
    for rank in range(2, len(network)):
        assert f"--host {line_host(platform, network[rank])}" in cluster.log(rank).read_text()


def line_host(platform: str, host: Host) -> str:
    return f"{host.name}.lockstep" if platform == "kubernetes" else host.address


@pytest.mark.parametrize("network", [4], indirect=True)
def test_the_batch_script_of_slurm_trains(network: list[Host], tmp_path: Path) -> None:
    """`hostname -I` and `openssl` are real."""
    cluster = Cluster(network, tmp_path, colocated=False)
    for name in ("srun", "scontrol"):
        cluster.program(name, SLURM, hosts={host.name: host.within for host in network})
    variables = {"SLURM_JOB_NODELIST": "lockstep-[0-3]", "SLURM_GPUS_ON_NODE": "1"}
    variables["PATH"] = f"{cluster.programs}:{os.environ['PATH']}"
    line = ["bash", str(SCRIPT), f"run_root={SHARED}", "run_name=slurm", "model.path=M", "data=gsm8k", "reward=numeric"]
    batch = cluster.start(0, line, variables)
    assert batch.wait(timeout=LIMIT_S) == 0, cluster.said()
    cluster.check("slurm")
    wait_until_gone(set().union(*(host.pids for host in network)))  # the servers end with the training
