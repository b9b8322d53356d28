"""Stored checkpoints: which are complete, their settings, and their state. A new run does not load this module."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors import SafetensorError

from lockstep.rollout.errors import CheckpointError
from lockstep.rollout.system.plain_files import read_plain
from lockstep.trainer.checkpoint.checkpoint import (
    CONFIG,
    MANIFEST,
    PARTIAL,
    REPLACED,
    SCHEMA,
    TrainerState,
    files_of,
    fingerprint,
)
from lockstep.trainer.distributed.distributed import Distributed

LOADED_SUFFIXES = (".pt", ".safetensors")
UNREADABLE = (OSError, RuntimeError, ValueError, KeyError, EOFError, SafetensorError, pickle.UnpicklingError)
"""Errors of loaders for files that are damaged, of another format, or would run code."""


def complete(directory: Path) -> tuple[list[Path], list[str]]:
    """Return complete checkpoints, oldest first, and a message on each directory that is not one."""
    checkpoints: list[tuple[int, bool, Path]] = []
    messages: list[str] = []
    for path in sorted(directory.glob("*step-*")) if directory.is_dir() else []:
        problem = check(path)
        if problem is None:
            update = json.loads((path / MANIFEST).read_text())["state"]["update"]
            checkpoints.append((update, not path.name.endswith(REPLACED), path))  # the replacement sorts after it
        else:
            messages.append(f"{path.name}: {problem}")
    return [path for *_, path in sorted(checkpoints)], messages


def check(path: Path) -> str | None:
    """Return the defect of a checkpoint, or None. Reads every byte of it."""
    if path.name.startswith(PARTIAL):
        return "was never finished"
    try:
        manifest = json.loads(read_plain(path / MANIFEST))
        files = manifest["files"]
        TrainerState.read(manifest["state"])
        if manifest["schema"] != SCHEMA:
            return f"has schema {manifest['schema']}, this version reads {SCHEMA}"
        if not isinstance(files, dict) or not all(_is_inside(name) for name in files):
            return "has a manifest that names files outside the checkpoint"
        if not all(type(manifest[name]) is int and manifest[name] >= 0 for name in ("world_size", "zero_stage")):
            return "has a manifest whose world_size or zero_stage is not a non-negative integer"
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        return f"has no readable manifest ({type(error).__name__})"
    for name, expected in files.items():
        file = path / name
        if not file.is_file():
            return f"lacks {name}"
        try:
            if fingerprint(file) != expected:
                return f"{name} is not what was written"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    for file in files_of(path):  # unverified, but a loader might read it
        if file.suffix in LOADED_SUFFIXES and str(file.relative_to(path)) not in files:
            return f"holds {file.relative_to(path)}, which its manifest does not name"
    return None


def find(resume: str, directory: Path) -> tuple[Path | None, list[str]]:
    """Return the checkpoint that `resume` selects (None: start a new run), and a message on each that was skipped.

    Unpublished saves are skipped, so a job that was preempted in its first save and queued again starts from the
    beginning. Raises `CheckpointError` if a named checkpoint is incomplete, or if all published ones are damaged.
    """
    if resume == "never":
        return None, []
    if resume != "auto":
        problem = check(Path(resume))
        if problem is not None:
            raise CheckpointError(f"{resume} {problem}; name a complete checkpoint, or set resume=auto")
        return Path(resume), []
    whole, messages = complete(directory)
    if not whole and any(not sentence.startswith(PARTIAL) for sentence in messages):
        raise CheckpointError(f"no complete checkpoint in {directory}: " + "; ".join(messages))
    return (whole[-1] if whole else None), messages


def load(path: Path, distributed: Distributed) -> TrainerState:
    """Restore parameters and optimizer state in place, and return the other state; a collective."""
    manifest = json.loads((path / MANIFEST).read_text())
    is_of_other_ranks = is_resharded(path, distributed)

    def read() -> None:
        try:
            if is_of_other_ranks:
                distributed.adopt_state(path, zero_stage=manifest["zero_stage"])
            else:
                distributed.load_state(path)
        except UNREADABLE as error:
            if isinstance(error, CheckpointError):
                raise
            reason = str(error).splitlines()[0] if str(error) else ""
            raise CheckpointError(f"{path} cannot be loaded: {type(error).__name__}: {reason}") from error

    distributed.together(read)
    return TrainerState.read(manifest["state"])


def is_resharded(path: Path, distributed: Distributed) -> bool:
    """True if other ranks wrote the shards of a complete checkpoint. Without ZeRO it has no shards."""
    manifest = json.loads((path / MANIFEST).read_text())
    saved_layout = (manifest["world_size"], manifest["zero_stage"])
    own = (distributed.world_size, distributed.zero_stage)
    return saved_layout != own and (saved_layout[1] > 0 or own[1] > 0)


def saved_settings(path: Path) -> Mapping[str, Any] | None:
    """Return the settings stored in a checkpoint; None for versions that stored none."""
    try:
        settings = json.loads(read_plain(path / CONFIG))
    except (OSError, ValueError, RecursionError):
        return None
    return settings if isinstance(settings, dict) else None


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and bool(path.parts)
