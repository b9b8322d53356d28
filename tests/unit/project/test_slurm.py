"""The SLURM script with stand-ins for the cluster's programs: each command is accepted, each address is reachable."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from accelerate.commands.launch import launch_command_parser

from lockstep.rollout.system.addresses import is_loopback
from lockstep.trainer.checks.validate import validate
from lockstep.trainer.compose import CONFIG_DIR
from lockstep.trainer.config.schema import Config
from tests.fixtures.composed import composed, served

ROOT = CONFIG_DIR.parent
SCRIPT = CONFIG_DIR / "slurm" / "servers.sbatch"
ADDRESSES = {"node-a": "10.0.0.1", "node-b": "10.0.0.2", "node-c": "10.0.0.3", "node-d": "10.0.0.4"}

STAND_INS = {
    "scontrol": "print('\\n'.join(ADDRESSES))",
    "openssl": "print('0123456789abcdef')",
    "hostname": "assert sys.argv[1:] == ['-I']; print(ADDRESSES[os.environ['SLURMD_NODENAME']], '192.168.122.1 ')",
    "srun": """
options = [word for word in sys.argv[1:] if word.startswith('--')][: sys.argv[1:].index('--overlap') + 2]
given = dict(word.removeprefix('--').partition('=')[::2] for word in options)
nodes = given['nodelist'].split(',')
assert len(nodes) == int(given['nodes']) == int(given['ntasks'])
for rank, node in enumerate(nodes):
    environment = {'SLURM_PROCID': str(rank), 'SLURM_NTASKS': given['ntasks'], 'SLURMD_NODENAME': node}
    subprocess.run(sys.argv[1 + len(options):], env={**os.environ, **environment}, check=True)
""",
    "python": "assert len(os.environ['LOCKSTEP_ENGINE_KEY']) == 16; write_down()",
    "accelerate": """
while Path(os.environ['SEEN']).read_text().count('serve_engine') < 2:  # the end of training ends the servers
    time.sleep(0.01)
write_down()
""",
}
BEGINNING = f"""#!{sys.executable}
import json, os, subprocess, sys, time
from pathlib import Path
ADDRESSES = {ADDRESSES}
def write_down():
    with open(os.environ['SEEN'], 'a') as seen:
        print(json.dumps([os.environ['SLURMD_NODENAME'], *sys.argv[1:]]), file=seen)
"""


@pytest.fixture
def commands(tmp_path: Path) -> dict[str, list[str]]:
    """The command of each node."""
    model, data = tmp_path / "model", tmp_path / "rows.jsonl"
    model.mkdir()
    (model / "config.json").write_text("{}")
    data.write_text('{"question": "1+1", "answer": "2"}\n')
    (tmp_path / "seen.jsonl").touch()
    for name, body in STAND_INS.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(BEGINNING + body)
        program.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "SEEN": str(tmp_path / "seen.jsonl"),
        "SLURM_JOB_NODELIST": "node-[a-d]",
        "SLURM_GPUS_ON_NODE": "8",
    }
    settings = [f"model.path={model}", f"data.path={data}", "reward=numeric", "rollout.max_model_len=8192"]
    done = subprocess.run(["bash", SCRIPT, *settings], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    assert len(seen) == len(ADDRESSES)
    return {node: words for node, *words in seen}


def config_of(overrides: list[str]) -> Config:
    config = composed(*overrides)
    validate(config)
    return config


def test_every_node_gets_a_command_that_its_program_accepts(commands: dict[str, list[str]]):
    for node in ("node-c", "node-d"):
        script, *overrides = commands[node]
        assert script == "scripts/serve_engine.py"
        config = config_of(overrides)
        assert config.server.host == ADDRESSES[node]
        assert served(config)[-2:] == ["--tensor-parallel-size", "8"]
    for rank, node in enumerate(("node-a", "node-b")):
        word, *options = commands[node]
        assert word == "launch"
        launch = launch_command_parser().parse_args(options)
        assert (ROOT / launch.config_file).is_file()
        assert (launch.machine_rank, launch.num_machines, launch.num_processes) == (rank, 2, 16)
        assert launch.main_process_ip == ADDRESSES["node-a"]
        assert launch.training_script == "scripts/train.py"
        urls = config_of(launch.training_script_args).rollout.urls
        assert urls == [f"http://{ADDRESSES[node]}:8000" for node in ("node-c", "node-d")]
        hosts = [launch.main_process_ip, *(str(urlsplit(url).hostname) for url in urls)]
        assert not any(map(is_loopback, hosts))
