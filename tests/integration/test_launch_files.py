"""Every file in configs/accelerate is launched on the CPU, and its update compared with a manual one.

A launch that does not join its ranks, or joins them and does not reduce their gradients, ends with other weights.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.fixtures.forked_python import forked_python
from tests.fixtures.ranks import run_ranks
from tests.unit.project.test_launching import on_kubernetes

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

LEARNING_RATE = 0.1
TIMEOUT_S = 300  # on busy cores

# Every rank has its own batch, so that ranks that train alone end with different weights.
SCRIPT = f"""
import json, sys
import torch
from lockstep.trainer.distributed.distributed import Distributed

distributed = Distributed.start(dtype="float32", max_grad_norm=1e9)
torch.manual_seed(0)
layer = torch.nn.Linear(4, 3)
layer = distributed.prepare(layer, torch.optim.SGD(layer.parameters(), lr=1.0))
with distributed.accumulate(is_last=True) as backward:
    backward(layer(torch.full((2, 4), float(distributed.rank + 1))).square().mean())
distributed.step({LEARNING_RATE}, distributed.gradient_norm())
output = layer(torch.ones(1, 4)).detach().float().flatten().tolist()
with open(f"{{sys.argv[1]}}/rank{{distributed.rank}}.json", "w") as file:
    json.dump({{"world_size": distributed.world_size, "zero_stage": distributed.zero_stage, "output": output}}, file)
distributed.barrier()
"""


def update_by_hand(num_ranks: int) -> list[float]:
    """Return the output of the layer after one SGD step on the mean gradient of all ranks' batches."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 3)
    loss = sum(layer(torch.full((2, 4), rank + 1.0)).square().mean() for rank in range(num_ranks)) / num_ranks
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    torch.optim.SGD(layer.parameters(), lr=LEARNING_RATE).step()
    return layer(torch.ones(1, 4)).detach().flatten().tolist()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(directory: Path, name: str, *options: str, within: Sequence[str] = ()) -> subprocess.Popen[str]:
    """Start a launcher. within: a command that runs it on another host."""
    script = directory / "script.py"
    script.write_text(SCRIPT)
    python = sys.executable if within else forked_python()  # a fork runs on the host of its server
    command = [*within, python, "-m", "accelerate.commands.accelerate_cli", "launch"]
    command += ["--config_file", str(ROOT / "configs" / "accelerate" / f"{name}.yaml"), *options]
    command += [str(script), str(directory)]
    # Hide GPUs: the files are tested on the CPU.
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment["PYTHON_EXEC"] = python  # of the ranks
    environment["TORCH_EXTENSIONS_DIR"] = str(directory / "compiled")  # no compiler runs: see the assertion in `check`
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(*launches: subprocess.Popen[str]) -> None:
    """Wait for all launchers; end those that are left after an error."""
    try:
        for running in launches:
            output, _ = running.communicate(timeout=TIMEOUT_S)
            assert running.returncode == 0, output[-3000:]
    finally:
        for running in launches:
            if running.poll() is None:
                running.terminate()  # the launcher ends its ranks
                running.wait(timeout=30)


def check(directory: Path, *, num_ranks: int, zero_stage: int) -> None:
    assert not (directory / "compiled").exists(), "a first ZeRO run on CPU would wait for a compiler"
    ranks = [json.loads(path.read_text()) for path in sorted(directory.glob("rank*.json"))]
    assert len(ranks) == num_ranks
    for rank in ranks:
        assert rank["world_size"] == num_ranks
        assert rank["zero_stage"] == zero_stage
        assert rank["output"] == pytest.approx(update_by_hand(num_ranks), abs=1e-6)


@pytest.mark.parametrize(
    ("name", "num_ranks", "zero_stage"),
    [
        ("single", 1, 0),
        pytest.param("ddp", 2, 0, marks=pytest.mark.slow),  # test_gradients.py launches by it, and by the next
        pytest.param("zero2", 2, 2, marks=pytest.mark.slow),
        ("zero3", 2, 3),
    ],
)
def test_a_launch_file_makes_the_update_of_all_ranks(
    tmp_path: Path, name: str, num_ranks: int, zero_stage: int
) -> None:
    finish(launch(tmp_path, name, "--main_process_port", str(free_port())))
    check(tmp_path, num_ranks=num_ranks, zero_stage=zero_stage)


@pytest.mark.slow  # zero3.yaml is the same but for the machines
def test_two_machines_make_the_update_of_all_ranks(tmp_path: Path) -> None:
    """Two launchers on loopback, as two machines would run them."""
    options = ["--num_processes", "2", "--main_process_port", str(free_port()), "--machine_rank"]
    machines = [launch(tmp_path, "multi_node", *options, rank) for rank in ("1", "0")]
    finish(*machines)
    check(tmp_path, num_ranks=2, zero_stage=3)


def test_two_pods_of_the_kubernetes_file_make_the_update_of_all_ranks(tmp_path: Path) -> None:
    """The lines of the file, as two processes on loopback, with the script of this test in the place of train.py."""
    port, python = str(free_port()), forked_python()
    programs = tmp_path / "environment/bin"
    programs.mkdir(parents=True)
    (programs / "accelerate").write_text(f'#!/bin/sh\nexec {python} -m accelerate.commands.accelerate_cli "$@"\n')
    (programs / "accelerate").chmod(0o755)
    for name in ("scripts/run_node.sh", "configs/accelerate/multi_node.yaml"):
        (tmp_path / name).parent.mkdir(parents=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "scripts" / "train.py").write_text(SCRIPT)
    pods = []
    for rank in range(2):
        line, variables = on_kubernetes("colocated", rank)
        own = {
            "NODES": "127.0.0.1 127.0.0.1",
            "GPUS": "1",
            "PORT": port,
            "VENV": str(programs.parent),
            "PYTHON_EXEC": python,
        }
        own |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        own |= {"TORCH_EXTENSIONS_DIR": str(tmp_path / "compiled")}
        pods.append(
            subprocess.Popen(
                [*line[: line.index("run") + 1], str(tmp_path)],
                cwd=tmp_path, env={**os.environ, **variables, **own},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
        )  # fmt: skip
    finish(*pods)
    check(tmp_path, num_ranks=2, zero_stage=3)


def test_a_script_without_a_launcher_is_one_rank(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    run_ranks((), tmp_path / "script.py", tmp_path, timeout_s=TIMEOUT_S, CUDA_VISIBLE_DEVICES="").check_returncode()
    check(tmp_path, num_ranks=1, zero_stage=0)
