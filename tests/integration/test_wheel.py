"""The wheel, installed alone: commands work in a directory that has modules of the same names."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.paths import ROOT
from tests.fixtures.remote import save_model

PACKAGED = ("trainer", "rollout", "rewards", "integrations", "lab", "demo", "configs", "scripts", "lockstep")
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the installed wheel alone, built from a copy of the checkout."""
    copy, wheels, site = (tmp_path_factory.mktemp(name) for name in ("copy", "wheels", "site"))
    for name in PACKAGED:
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", wheels, copy], check=True)
    (wheel,) = wheels.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", site, wheel], check=True)
    return site


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A directory of a user, with data, a reward, a settings file, and modules of the same names."""
    for name in ("trainer", "rollout", "rewards", "evaluate", "scripts"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a module of the user was imported')\n")
    rows = [{"question": f"compute {i}+1", "answer": str(i + 1)} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text("def many_tokens(rollout): return float(rollout.num_sampled % 7)\n")
    (tmp_path / "run.yaml").write_text(
        "data: {path: rows.jsonl}\n"
        "reward: {functions: ['mine.py:many_tokens']}\n"
        f"model: {{path: {save_model(tmp_path / 'model')}}}\n"
        "rollout: {max_model_len: 320, prompts_per_step: 2, samples_per_prompt: 4, max_tokens_per_turn: 16}\n"
        "updates: 1\n"
        "run_name: first\n"
    )
    return tmp_path


def run(task: Path, site: Path, *words: str) -> str:
    done = subprocess.run(
        words,
        cwd=task,
        env={**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_the_wheel_has_no_upkeep_of_the_repository(site: Path) -> None:
    folders = {path.name for path in (site / "lockstep/scripts").iterdir() if path.is_dir()} - {"__pycache__"}
    assert folders == {"gpu_checks", "recipes"}
    assert (site / "lockstep/configs/accelerate/zero3.yaml").is_file()


@pytest.mark.engine
def test_a_task_of_ones_own_is_trained_and_read(site: Path, task: Path) -> None:
    program = str(site / "bin/lockstep")
    assert "All checks passed" in run(task, site, program, "train", "run.yaml", "dry_run=true")
    trained = run(task, site, program, "train", "run.yaml")
    assert "update 1/1" in trained
    assert (task / "runs/first/model/config.json").is_file()
    assert "lockstep report runs/first" in trained
    assert run(task, site, program, "report", "runs/first") == "runs/first/report.html\n"
    assert "compute" in run(task, site, program, "inspect", "runs/first")


@pytest.mark.slow
@pytest.mark.engine
def test_checks_and_recipes_need_no_checkout(site: Path, task: Path) -> None:
    program = str(site / "bin/lockstep")
    assert "1 passed, 0 failed" in run(task, site, program, "gpu-check", "--rehearse", "--only", "first_update")
    assert "gsm8k_ppo" in run(task, site, program, "reproduce")


@pytest.mark.slow
@pytest.mark.engine
def test_a_program_of_ones_own_trains_and_its_model_is_published(site: Path, task: Path) -> None:
    (task / "program.py").write_text(
        "import lockstep\n"
        "from lockstep.lab.watch.page_server import FILES, FOLDER\n"
        "rows = [{'question': f'compute {number}+1', 'answer': str(number + 1)} for number in range(8)]\n"
        "def tokens(rollout): return float(rollout.num_sampled % 7)\n"
        "run = lockstep.train('run.yaml', data=rows, rewards=[tokens], run_name='own')\n"
        "assert '<svg' in run._repr_html_()\n"
        "assert all(path.is_file() for path, _ in FILES.values()) and (FOLDER / 'page/watch.html').is_file()\n"
        "print(sorted(key for key in run.history[0] if key.startswith('reward/mean')))\n"
    )
    assert "['reward/mean']" in run(task, site, sys.executable, "program.py")
    published = run(
        task, site, str(site / "bin/lockstep"), "publish", "runs/own", "--repo", "me/own", "--out", "folder"
    )
    assert "hf upload me/own folder ." in published
    card = (task / "folder/README.md").read_text()
    assert "object:tokens" in card
    assert str(task) not in card


@pytest.mark.engine
@pytest.mark.distributed
def test_two_ranks_are_launched_by_the_name_of_the_module(site: Path, task: Path) -> None:
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2"]
    launcher += ["--config_file", str(site / "lockstep/configs/accelerate/zero3.yaml"), "--main_process_port", "0"]
    said = run(task, site, *launcher, "-m", "lockstep", "train", "run.yaml", "run_name=second")
    assert "update 1/1" in said
    assert "-m lockstep train run_name=second resume=auto" in said.replace("\n", " ")
