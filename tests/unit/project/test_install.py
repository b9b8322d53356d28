"""Decisions of scripts/install.sh on made-up machines: a PATH with chosen programs and a stand-in for Python.

Covered: the requested packages, their order and source; what is kept, redone or moved aside; the messages on machines
that lack something. Not covered: that pip can fetch the packages and that they work together. That takes minutes and a
network; `make install` in a fresh clone shows it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.fixtures.paths import ROOT

# Answers questions about itself as the real Python would, makes environments that hold a copy of itself, and logs what
# it would have installed. A pip call that contains the text of the file `refuse` fails.
STAND_IN = """#!{sh}
case "$1" in
    -m)
        case "$2" in
            venv) [ -e {root}/no-venv ] && {{ echo "No module named venv" >&2; exit 1; }}
                  mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
            pip)  echo "$*" >> {root}/pip-calls
                  if [ -e {root}/refuse ] && echo "$*" | grep -q -e "$(cat {root}/refuse)"; then
                      echo "ERROR: pip says no" >&2; exit 1
                  fi ;;
        esac ;;
    -c)
        case "$2" in
            *realpath*) echo "$0" ;;
            "import pip") ;;
            *torch.cuda* | *libtorch*) ;;
            *) exec {python} -IS "$@" ;;
        esac ;;
    -) [ $# -gt 1 ] || exec {python} -IS "$@" ;;
    *) exec {python} -IS "$@" ;;
esac
"""

LOCKED = "--require-hashes --no-deps --no-build-isolation --use-pep517"
PROJECT = "--no-deps --no-build-isolation --editable ."
CPU_TORCH = f"{LOCKED} --requirement requirements/torch-cpu.txt"
BUILD_TOOLS = f"{LOCKED} --requirement requirements/build.txt"


class Machine:
    """A checkout and its own PATH."""

    PROGRAMS = (
        "bash",
        "cat",
        "cp",
        "date",
        "dirname",
        "grep",
        "head",
        "mkdir",
        "mv",
        "rm",
        "rmdir",
        "sed",
        "sha256sum",
    )

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bin = root / "bin"
        self.checkout = root / "checkout"
        self.venv = self.checkout / ".venv"
        self.bin.mkdir()
        (self.checkout / "scripts").mkdir(parents=True)
        for name in ("pyproject.toml", "scripts/install.sh"):
            shutil.copy(ROOT / name, self.checkout / name)
        shutil.copytree(ROOT / "requirements", self.checkout / "requirements")
        for name in self.PROGRAMS:
            (self.bin / name).symlink_to(str(shutil.which(name)))
        self.add("uname", '[ "$1" = -s ] && echo Linux || echo x86_64')
        self.add("g++", "exit 0")
        stand_in = STAND_IN.format(sh=shutil.which("sh"), root=root, python=sys.executable)
        (self.bin / "python3").write_text(stand_in)
        (self.bin / "python3").chmod(0o755)

    def add(self, name: str, body: str) -> None:
        (self.bin / name).write_text(f"#!{shutil.which('sh')}\n{body}\n")
        (self.bin / name).chmod(0o755)

    def install(self, **settings: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(shutil.which("bash")), self.checkout / "scripts" / "install.sh"],
            env={"PATH": str(self.bin)} | settings,
            capture_output=True,
            text=True,
            check=False,
        )

    def take_pip_calls(self) -> list[str]:
        """Return the calls of pip since the last time, without the flags that all calls share."""
        log = self.root / "pip-calls"
        calls = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        shared = "-m pip install --quiet --quiet --disable-pip-version-check --no-input "
        return [call.removeprefix(shared).removeprefix("-m pip ") for call in calls]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


# Packages and their source


def test_a_machine_without_a_gpu_gets_the_cpu_torch_first_and_nothing_that_is_not_locked(machine: Machine) -> None:
    finished = machine.install()
    assert finished.returncode == 0, finished.stderr
    assert "torch 2.13.0, CPU build" in finished.stdout
    assert machine.take_pip_calls() == [CPU_TORCH, BUILD_TOOLS, f"{LOCKED} --requirement requirements/cpu.txt", PROJECT]


def test_the_cpu_torch_comes_from_its_own_index_where_the_configured_one_lacks_it(machine: Machine) -> None:
    (machine.root / "refuse").write_text("use-pep517 --requirement requirements/torch")
    finished = machine.install()
    assert finished.returncode == 0, finished.stderr
    assert "pip says no" not in finished.stderr, "the first attempt is allowed to fail"
    assert machine.take_pip_calls()[:2] == [
        CPU_TORCH,
        CPU_TORCH.replace("--requirement", "--index-url https://download.pytorch.org/whl/cpu --requirement"),
    ]


def test_a_cpu_torch_that_is_nowhere_is_never_replaced_by_the_cuda_build(machine: Machine) -> None:
    (machine.root / "refuse").write_text("torch-cpu")
    finished = machine.install()
    assert finished.returncode == 1
    assert finished.stderr.count("pip says no") == 2, "both attempts are shown in full"
    assert len(machine.take_pip_calls()) == 2


def test_a_machine_with_a_gpu_gets_the_cuda_build(machine: Machine) -> None:
    machine.add("nvidia-smi", "echo 'GPU 0: NVIDIA H100'")
    finished = machine.install()
    assert finished.returncode == 0, finished.stderr
    assert "for cuda" in finished.stdout
    assert machine.take_pip_calls() == [BUILD_TOOLS, f"{LOCKED} --requirement requirements/cuda.txt", PROJECT]


def test_another_vllm_is_installed_from_its_own_lock_and_one_without_a_lock_is_refused(machine: Machine) -> None:
    assert machine.install(ACCELERATOR="cuda", VLLM="0.33").returncode == 0
    assert f"{LOCKED} --requirement requirements/cuda-0.33.txt" in machine.take_pip_calls()
    refused = machine.install(ACCELERATOR="cuda", VLLM="0.31")
    assert refused.returncode == 1
    assert "there is no requirements/cuda-0.31.txt" in refused.stderr
    assert "requirements/cuda-0.33.txt" in refused.stderr
    assert "no requirements/cpu-0.33.txt" in machine.install(ACCELERATOR="cpu", VLLM="0.33").stderr


@pytest.mark.parametrize("says", ["echo 'NVIDIA-SMI has failed'; exit 9", "echo 'No devices were found'"])
def test_an_nvidia_smi_that_finds_no_gpu_does_not_count(machine: Machine, says: str) -> None:
    machine.add("nvidia-smi", says)
    assert "for cpu" in machine.install().stdout


def test_the_accelerator_can_be_chosen(machine: Machine) -> None:
    assert "for cuda" in machine.install(ACCELERATOR="cuda").stdout
    refused = machine.install(ACCELERATOR="tpu")
    assert refused.returncode == 1
    assert "ACCELERATOR=cpu" in refused.stderr


# Kept, redone, moved aside


def test_a_second_call_does_nothing_and_says_nothing(machine: Machine) -> None:
    machine.install()
    machine.take_pip_calls()
    again = machine.install()
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert machine.take_pip_calls() == []


@pytest.mark.parametrize("changed", ["pyproject.toml", "requirements/cpu.txt", "requirements/torch-cpu.txt"])
def test_another_pin_is_installed_into_the_same_environment(machine: Machine, changed: str) -> None:
    machine.install()
    (machine.venv / "witness").touch()
    machine.take_pip_calls()
    with (machine.checkout / changed).open("a") as file:
        file.write("# another pin\n")
    assert machine.install().returncode == 0
    assert len(machine.take_pip_calls()) == 4
    assert (machine.venv / "witness").exists()


def test_an_install_that_failed_is_done_again_from_the_start(machine: Machine) -> None:
    (machine.root / "refuse").write_text("--editable")
    failed = machine.install()
    assert failed.returncode == 1
    assert "pip says no" in failed.stderr
    (machine.venv / "witness").touch()
    (machine.root / "refuse").unlink()
    machine.take_pip_calls()
    assert machine.install().returncode == 0
    assert len(machine.take_pip_calls()) == 4
    assert not (machine.venv / "witness").exists()
    assert machine.install().stdout == ""


def test_an_upgrade_that_failed_is_not_taken_for_a_finished_one(machine: Machine) -> None:
    """Pins change, the install fails, the pins change back: the environment is neither the old nor the new one."""
    machine.install()
    before = (machine.checkout / "pyproject.toml").read_text()
    (machine.checkout / "pyproject.toml").write_text(before + "# another pin\n")
    (machine.root / "refuse").write_text("--editable")
    assert machine.install().returncode == 1
    (machine.checkout / "pyproject.toml").write_text(before)
    (machine.root / "refuse").unlink()
    machine.take_pip_calls()
    assert machine.install().returncode == 0
    assert len(machine.take_pip_calls()) == 4


def test_another_accelerator_gets_a_new_environment(machine: Machine) -> None:
    machine.install()
    (machine.venv / "witness").touch()
    assert machine.install(ACCELERATOR="cuda").returncode == 0
    assert not (machine.venv / "witness").exists()


def test_a_moved_checkout_gets_a_new_environment(machine: Machine) -> None:
    machine.install()
    (machine.venv / "witness").touch()
    moved = machine.checkout.rename(machine.root / "elsewhere")
    machine.checkout, machine.venv = moved, moved / ".venv"
    assert "setting up" in machine.install().stdout
    assert not (machine.venv / "witness").exists()


def test_an_environment_that_install_did_not_make_is_moved_aside_and_kept(machine: Machine) -> None:
    machine.venv.mkdir()
    (machine.venv / "precious").touch()
    finished = machine.install()
    assert finished.returncode == 0, finished.stderr
    assert "moving it to .venv.before-lockstep-" in finished.stdout
    assert len(list(machine.checkout.glob(".venv.before-lockstep-*/precious"))) == 1


# Machines that lack something

OLD_PYTHON = '[ "$1" = --version ] && echo "Python 3.9.18"; exit 1'
UNAME = '[ "$1" = -s ] && echo {} || echo {}'


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda machine: machine.add("python3", OLD_PYTHON), ["Python 3.9.18", "PYTHON="]),
        (lambda machine: (machine.root / "no-venv").touch(), ["No module named venv", "apt-get install python3-venv"]),
        (lambda machine: (machine.bin / "g++").unlink(), ["apt-get install g++"]),
        (lambda machine: machine.add("uname", UNAME.format("Darwin", "arm64")), ["Darwin", "Linux"]),
        (lambda machine: machine.add("uname", UNAME.format("Linux", "ppc64le")), ["ppc64le", "x86_64"]),
    ],
    ids=["old python", "no venv", "no compiler", "macOS", "PowerPC"],
)
def test_the_message_names_what_is_missing_and_what_to_do(
    machine: Machine, change: Callable[[Machine], object], expected: list[str]
) -> None:
    change(machine)
    finished = machine.install()
    assert finished.returncode == 1
    assert [text for text in expected if text not in finished.stderr] == []
    assert not (machine.venv / ".lockstep-installed").exists()


def test_a_newer_python_beside_an_old_python3_is_found(machine: Machine) -> None:
    (machine.bin / "python3").rename(machine.bin / "python3.12")
    machine.add("python3", OLD_PYTHON)
    assert machine.install().returncode == 0


def test_a_requested_python_is_never_replaced_by_another(machine: Machine) -> None:
    machine.add("python3.9", OLD_PYTHON)
    assert "PYTHON=python3.9 is Python 3.9.18" in machine.install(PYTHON="python3.9").stderr
    assert "PYTHON=python3.12 was not found" in machine.install(PYTHON="python3.12").stderr
    assert not machine.venv.exists()


def test_a_cpu_build_of_torch_is_refused_where_cuda_was_asked_for() -> None:
    """With the torch of this environment; an image for CUDA is built without a GPU that would show the mistake."""
    script = (ROOT / "scripts" / "install.sh").read_text()
    check = script.rpartition("<<'PY'")[2].partition("\n")[2].partition("\nPY\n")[0]
    done = subprocess.run([sys.executable, "-", "cuda"], input=check, cwd=ROOT, capture_output=True, text=True)
    if torch.version.cuda is None:
        assert done.returncode == 1
        assert "a CPU build; expected a CUDA build" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
