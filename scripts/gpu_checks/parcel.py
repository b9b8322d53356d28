"""One file with all that a distant reader needs to understand a GPU check: `gpu-check-<time>.zip`.

Covered: the results, the end of every log, stacks of checks that timed out, the operators of one update, the engines'
resolved settings, memory summaries, and facts on the machine. Keys, passwords, home directories and the names of user
and host are replaced; lines that only look harmless are not, so read it before you publish it. Not covered: models,
traces, rollouts.
"""

from __future__ import annotations

import getpass
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from lockstep.trainer.config.redaction import is_secret, redact_text

KEPT = (".txt", ".log", ".json", ".html", ".md")
"""Suffixes of the files of a check that are kept; `metrics.jsonl` as well."""
LEFT_OUT = re.compile(r"(^|/)(model|pushed|w8a8|big|mixture|long|checkpoints|rollouts)(/|$)|tokenizer|rows\.jsonl")
TAIL_BYTES = 200_000
"""Bytes of a file that are kept, from its end."""
VARIABLES = re.compile(
    r"^(NCCL|GLOO|VLLM|LOCKSTEP|TORCH|PYTORCH|CUDA|NVIDIA|OMP|MKL|TRITON|DS|DEEPSPEED|ACCELERATE|HF|PYTHON)_?|"
    r"^(LD_LIBRARY_PATH|PATH|RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT)$"
)
COMMANDS = {
    "nvidia-smi.txt": ["nvidia-smi", "-q"],
    "topology.txt": ["nvidia-smi", "topo", "-m"],
    "processes.txt": ["nvidia-smi", "--query-compute-apps=pid,name,used_memory", "--format=csv"],
}


def pack(directory: Path) -> Path:
    """Write the file beside the run directory and return its path."""
    target = directory.with_suffix(".zip")
    hide = without_secrets()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(directory.rglob("*")):
            name = path.relative_to(directory).as_posix()
            is_kept = path.suffix in KEPT or path.name == "metrics.jsonl"
            if path.is_file() and not path.is_symlink() and is_kept and not LEFT_OUT.search(name):
                archive.writestr(name, hide(_tail(path)))
        for name, text in _machine():
            archive.writestr(f"machine/{name}", hide(text))
    return target


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        text = file.read().decode("utf-8", errors="replace")
    cut = size - TAIL_BYTES
    return f"[the first {cut} bytes of {path.name} are left out]\n{text}" if cut > 0 else text


def _machine() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each file about this machine."""
    for name, command in COMMANDS.items():
        if shutil.which(command[0]) is None:
            yield name, f"{command[0]} was not found"
        else:
            result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            yield name, result.stdout + result.stderr
    variables = {name: value for name, value in sorted(os.environ.items()) if VARIABLES.search(name)}
    lines = (f"{name}={'<redacted>' if is_secret(name, value) else value}" for name, value in variables.items())
    yield "environment.txt", "\n".join(lines)
    packages = {f"{each.metadata['Name']}=={each.version}" for each in importlib.metadata.distributions()}
    yield "packages.txt", "\n".join(sorted(packages, key=str.lower))
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    limits = [f"{name} {resource.getrlimit(vars(resource)[name])}" for name in names]
    sizes = [f"{path} {shutil.disk_usage(path)}" for path in ("/dev/shm", "/tmp") if Path(path).exists()]
    yield "limits.txt", "\n".join([platform.platform(), f"{os.cpu_count()} cores", *limits, *sizes])


def without_secrets() -> Callable[[str], str]:
    """Return a function that replaces secrets and the names of user, host and home directory in a text."""
    names = {str(Path.home()): "~", platform.node(): "<host>", getpass.getuser(): "<user>"}
    plain = {name: mark for name, mark in names.items() if len(name) > 3 and name != "root"}
    pattern = re.compile("|".join(map(re.escape, sorted(plain, key=len, reverse=True))) or r"(?!)")
    return lambda text: pattern.sub(lambda match: plain[match[0]], redact_text(text))
