"""Launch files for Kubernetes, SkyPilot and dstack: schemas, and the command that each node executes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser

from lockstep.trainer.compose import CONFIG_DIR
from tests.fixtures.composed import served
from tests.unit.project.test_slurm import config_of

ROOT = CONFIG_DIR.parent
TOPOLOGIES = ("colocated", "servers")
SERVERS = {"colocated": 0, "servers": 2}
KEY = "0123456789abcdef"

# The programs that a node executes. A server runs until it gets a signal; the trainer ends by itself, or with WAITS set
# also at a signal.
STAND_IN = f"""#!{sys.executable}
import json, os, signal, sys, time
from pathlib import Path
name, seen = Path(sys.argv[0]).name, Path(os.environ["SEEN"])
signal.signal(signal.SIGTERM, lambda *_: (seen.with_suffix(".ended").touch(), os._exit(143)))
said = {{"argv": [name, *sys.argv[1:]], "pid": os.getpid(), "environment": dict(os.environ)}}
seen.with_suffix(".partial").write_text(json.dumps(said))
seen.with_suffix(".partial").rename(seen)
while name == "python" or "WAITS" in os.environ:
    time.sleep(0.01)
sys.exit(int(os.environ.get("STATUS", "0")))
"""


def kubernetes(topology: str) -> dict[str, Any]:
    """Return the objects of a file by their kind."""
    documents = yaml.safe_load_all((CONFIG_DIR / "kubernetes" / f"{topology}.yaml").read_text())
    return {document["kind"]: document for document in documents}


def container_of(job: Mapping[str, Any]) -> dict[str, Any]:
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return container


def on_kubernetes(topology: str, rank: int) -> tuple[list[str], dict[str, str]]:
    """Return the command of a pod and the variables that it gets, without those of the secret."""
    container = container_of(kubernetes(topology)["Job"])
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    return [*container["command"], *container["args"]], variables | {"JOB_COMPLETION_INDEX": str(rank)}


def addresses(topology: str) -> list[str]:
    return [f"10.0.0.{i + 1}" for i in range(2 + SERVERS[topology])]


def on_skypilot(topology: str, rank: int) -> tuple[list[str], dict[str, str]]:
    task = yaml.safe_load((CONFIG_DIR / "skypilot" / f"{topology}.yaml").read_text())
    variables = {
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
        "SKYPILOT_NODE_IPS": "\n".join(addresses(topology)),
        "SKYPILOT_NUM_GPUS_PER_NODE": task["resources"]["accelerators"].partition(":")[2],
        "SKYPILOT_TASK_ID": "task-1",
    }
    assert len(addresses(topology)) == task["num_nodes"]
    return ["bash", "-c", task["run"]], {name: str(value) for name, value in task["envs"].items()} | variables


def on_dstack(topology: str, rank: int) -> tuple[list[str], dict[str, str]]:
    task = yaml.safe_load((CONFIG_DIR / "dstack" / f"{topology}.dstack.yml").read_text())
    variables = {
        "DSTACK_NODE_RANK": str(rank),
        "DSTACK_NODES_NUM": str(task["nodes"]),
        "DSTACK_NODES_IPS": "\n".join(addresses(topology)),
        "DSTACK_MASTER_NODE_IP": addresses(topology)[0],
        "DSTACK_GPUS_PER_NODE": task["resources"]["gpu"].partition(":")[2],
    }
    assert len(addresses(topology)) == task["nodes"]
    given = dict(entry.split("=", 1) for entry in task["env"] if "secrets." not in entry)
    return [task["shell"], "-c", " && ".join(task["commands"])], given | variables


PLATFORMS: dict[str, Callable[[str, int], tuple[list[str], dict[str, str]]]] = {
    "kubernetes": on_kubernetes,
    "skypilot": on_skypilot,
    "dstack": on_dstack,
}
each_file = pytest.mark.parametrize(
    ("platform", "topology"), [(platform, topology) for platform in PLATFORMS for topology in TOPOLOGIES]
)


class Node:
    """A node that executes the lines of a launch file, with stand-ins for `accelerate` and `python`."""

    def __init__(self, directory: Path, platform: str, topology: str, rank: int, **more: str) -> None:
        self.seen = directory / f"node-{rank}.json"
        for name in ("accelerate", "python"):
            program = directory / "env" / "bin" / name
            program.parent.mkdir(parents=True, exist_ok=True)
            program.write_text(STAND_IN)
            program.chmod(0o755)
        line, variables = PLATFORMS[platform](topology, rank)
        own = {"VENV": str(directory / "env"), "SEEN": str(self.seen), "LOCKSTEP_ENGINE_KEY": KEY}
        if "RUNS" in variables:
            variables["RUNS"] = str(directory)
        self.process = subprocess.Popen(line, cwd=ROOT, env={**os.environ, **variables, **own, **more})

    def said(self) -> dict[str, Any]:
        """Return the command that the node executed, as soon as it has."""
        wait_for(self.seen.exists)
        return json.loads(self.seen.read_text())


def wait_for(condition: Callable[[], bool], limit_s: float = 200) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def start(tmp_path: Path):
    """Start nodes that end with the test."""
    nodes: list[Node] = []

    def start_one(platform: str, topology: str, rank: int, **more: str) -> Node:
        nodes.append(Node(tmp_path, platform, topology, rank, **more))
        return nodes[-1]

    yield start_one
    for node in nodes:
        if node.process.poll() is None:
            node.process.terminate()
            node.process.wait(timeout=200)


@each_file
def test_every_node_gets_a_command_that_its_program_accepts(platform: str, topology: str, start):
    hosts = (
        [f"lockstep-{rank}.lockstep" for rank in range(2 + SERVERS[topology])]
        if platform == "kubernetes"
        else addresses(topology)
    )
    for rank, host in enumerate(hosts):
        program, *words = start(platform, topology, rank, WAITS="yes").said()["argv"]
        if rank >= 2:
            assert program == "python"
            assert words[0] == "scripts/serve_engine.py"
            config = config_of(words[1:])
            assert (config.server.host, config.server.port) == (host, 8000)
            assert served(config)[-2:] == ["--tensor-parallel-size", "8"]
            continue
        assert (program, words[0]) == ("accelerate", "launch")
        launch = launch_command_parser().parse_args(words[1:])
        assert (ROOT / launch.config_file).is_file()
        assert (launch.machine_rank, launch.num_machines, launch.num_processes) == (rank, 2, 16)
        assert launch.main_process_ip == hosts[0]
        assert launch.training_script == "scripts/train.py"
        config = config_of(launch.training_script_args)
        assert (config.resume, config.run_root == "/runs" or platform == "skypilot") == ("auto", True)
        assert config.run_name
        assert config.rollout.engine == ("server" if SERVERS[topology] else "colocated")
        if SERVERS[topology]:
            assert config.rollout.urls == [f"http://{server}:8000" for server in hosts[2:]]


@pytest.mark.parametrize("platform", ["kubernetes", "dstack"])
def test_the_program_takes_the_place_of_the_shell_and_ends_before_it_is_killed(platform: str, start):
    node = start(platform, "colocated", 0, WAITS="yes")
    said = node.said()
    assert said["pid"] == node.process.pid  # so a signal to the container is one to the program
    grace_s = int(said["environment"]["GRACE_S"])
    assert int(said["environment"]["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) == grace_s - 30
    node.process.terminate()
    assert node.process.wait(timeout=200) == 143


@pytest.mark.long
def test_servers_under_skypilot_end_after_the_training(start):
    servers = [start("skypilot", "servers", rank) for rank in (2, 3)]
    for server in servers:
        server.said()
    trainers = [start("skypilot", "servers", rank) for rank in (0, 1)]
    assert [node.process.wait(timeout=200) for node in trainers] == [0, 0]
    assert [node.process.wait(timeout=200) for node in servers] == [0, 0]
    for server in servers:
        wait_for(server.seen.with_suffix(".ended").exists)


@pytest.mark.long
def test_servers_under_skypilot_run_on_after_a_failed_training(start):
    server = start("skypilot", "servers", 2)
    server.said()
    assert start("skypilot", "servers", 0, STATUS="3").process.wait(timeout=200) == 3  # SkyPilot ends the other nodes
    with pytest.raises(subprocess.TimeoutExpired):
        server.process.wait(timeout=6)  # it looks every 5 s


@pytest.mark.long
def test_a_signal_reaches_the_server_under_skypilot(start):
    server = start("skypilot", "servers", 2)
    server.said()
    server.process.terminate()
    server.process.wait(timeout=200)
    wait_for(server.seen.with_suffix(".ended").exists)


@pytest.mark.long
def test_a_server_that_dies_under_skypilot_fails_its_node(start):
    server = start("skypilot", "servers", 2)
    os.kill(server.said()["pid"], signal.SIGKILL)
    assert server.process.wait(timeout=200) != 0


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"NODE_RANK": "0", "GPUS": "8"}, "NODES is not set"),
        ({"NODE_RANK": "0", "NODES": "a b", "GPUS": "8", "SERVERS": "2"}, "at least one node must train"),
        ({"NODE_RANK": "2", "NODES": "a b", "GPUS": "8"}, "found 2 nodes"),
    ],
)
def test_a_wrong_variable_is_named(variables: dict[str, str], message: str):
    environment = {"PATH": os.environ["PATH"], **variables}
    done = subprocess.run(["bash", "scripts/run_node.sh"], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_the_parts_of_a_kubernetes_file_fit_together(topology: str):
    objects = kubernetes(topology)
    job, service, policy = objects["Job"], objects["Service"], objects["NetworkPolicy"]
    pod, container = job["spec"]["template"]["spec"], container_of(job)
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    name = job["metadata"]["name"]
    num_nodes = job["spec"]["completions"]
    assert job["spec"]["parallelism"] == num_nodes
    assert pod["subdomain"] == service["metadata"]["name"]
    assert variables["NODES"].split() == [f"{name}-{i}.{pod['subdomain']}" for i in range(num_nodes)]
    assert int(variables["GPUS"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert int(variables["GRACE_S"]) == pod["terminationGracePeriodSeconds"]
    label = {"batch.kubernetes.io/job-name": name}
    assert service["spec"]["selector"] == policy["spec"]["podSelector"]["matchLabels"] == label
    trainers = num_nodes - int(variables.get("SERVERS", "0"))
    if topology == "servers":
        assert job["spec"]["successPolicy"] == {"rules": [{"succeededIndexes": f"0-{trainers - 1}"}]}


def test_every_file_takes_keys_from_secrets_only():
    """The value of a key never stands in a file: it is a reference, or null for one given at the start."""
    for path in (path for name in PLATFORMS for path in (CONFIG_DIR / name).iterdir()):
        text = path.read_text()
        for line in (line for line in text.splitlines() if not line.startswith("#")):
            if any(key in line for key in ("HF_TOKEN", "WANDB_API_KEY", "LOCKSTEP_ENGINE_KEY")):
                assert line.endswith(": null") or "${{ secrets." in line, (path, line)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_kubernetes_accepts_the_file(topology: str):
    validator = pytest.importorskip("kubernetes_validate")
    # The version that has the newest field: a successPolicy is stable since 1.33.
    for document in kubernetes(topology).values():
        validator.validate(document, "1.33", strict=True)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_dstack_accepts_the_file(topology: str):
    configurations = pytest.importorskip("dstack._internal.core.models.configurations")
    text = (CONFIG_DIR / "dstack" / f"{topology}.dstack.yml").read_text()
    configuration = configurations.parse_apply_configuration(yaml.safe_load(text))
    assert configuration.type == "task"


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_skypilot_accepts_the_file(topology: str):
    sky = pytest.importorskip("sky")
    from sky.utils import common_utils, schemas

    path = CONFIG_DIR / "skypilot" / f"{topology}.yaml"
    common_utils.validate_schema(yaml.safe_load(path.read_text()), schemas.get_task_schema(), f"{path}: ")
    given = {"HF_TOKEN": "x", "WANDB_API_KEY": "x", "LOCKSTEP_ENGINE_KEY": "x"}
    config = yaml.safe_load(path.read_text())
    secrets = {name: given[name] for name in config["secrets"]}
    task = sky.Task.from_yaml_config(config, secrets_overrides=list(secrets.items()))
    assert task.num_nodes == 2 + SERVERS[topology]
