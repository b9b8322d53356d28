"""Checkpoints that are whole or not there.

A checkpoint is written into a temporary directory; its manifest, with the size and SHA-256 of every file, comes last;
then the directory is renamed into place. What has no valid manifest is no checkpoint, and the loader names what it
skipped. Old checkpoints go only after a new one is published.

State is parameters, optimizer state, and a few numbers: updates done, rows taken, the weight of the KL penalty. Data
order, sampling seeds, minibatch order and the learning rate are functions of these numbers and the configuration.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rollout.errors import CheckpointError
from trainer.distributed import Distributed

SCHEMA = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """Everything that is not a tensor and cannot be derived."""

    step: int
    """Rollout batches trained."""
    update: int
    """Optimizer updates done; also the version of the weights."""
    data_cursor: int
    """Data rows taken."""
    kl_coef: float | None = None
    """Weight of the KL penalty, where a controller adapts it."""
    wandb_id: str | None = None


def save(directory: Path, state: TrainerState, distributed: Distributed, *, keep: int) -> Path:
    """Write checkpoint `step-N` below `directory`, publish it, then drop all but the newest `keep`. A collective.

    Raises `CheckpointError` on all ranks if the disk is full or not writable; earlier checkpoints are untouched.
    """
    final = directory / f"step-{state.update}"
    temporary = directory / f".partial-step-{state.update}"

    def prepare() -> None:
        if distributed.is_main:
            try:
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
            except OSError as error:
                raise CheckpointError(f"{temporary} cannot be made: {error}") from error

    def write() -> None:
        try:
            distributed.save_state(temporary)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"checkpoint {final} cannot be written: {error}") from error

    def publish() -> None:
        if not distributed.is_main:
            return
        try:
            (temporary / "state.json").write_text(json.dumps(asdict(state), indent=2))
            manifest = {
                "schema": SCHEMA,
                "state": asdict(state),
                "world_size": distributed.world_size,
                "zero_stage": distributed.zero_stage,
                "files": {str(file.relative_to(temporary)): _fingerprint(file) for file in _files(temporary)},
            }
            (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2))
            for file in [*_files(temporary), temporary]:
                _fsync(file)
            if final.exists():
                shutil.rmtree(final)
            temporary.rename(final)
            _fsync(directory)
            for old in complete(directory)[0][:-keep]:
                shutil.rmtree(old)
        except OSError as error:
            raise CheckpointError(f"checkpoint {final} cannot be published: {error}") from error

    for phase in (prepare, write, publish):
        distributed.together(phase)
    return final


def complete(directory: Path) -> tuple[list[Path], list[str]]:
    """Checkpoints with a valid manifest, oldest first, and a sentence on each directory that is not one."""
    found: list[tuple[int, Path]] = []
    skipped: list[str] = []
    for path in sorted(directory.glob("*step-*")) if directory.is_dir() else []:
        problem = check(path)
        if problem is None:
            found.append((json.loads((path / MANIFEST).read_text())["state"]["update"], path))
        else:
            skipped.append(f"{path.name}: {problem}")
    return [path for _, path in sorted(found)], skipped


def check(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None. Reads every byte of it."""
    if path.name.startswith("."):
        return "was never finished"
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files: dict[str, Any] = manifest["files"]
        if manifest["schema"] != SCHEMA:
            return f"has schema {manifest['schema']}, this version reads {SCHEMA}"
        TrainerState(**manifest["state"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"has no readable manifest ({type(error).__name__})"
    for name, expected in files.items():
        file = path / name
        if not file.is_file():
            return f"lacks {name}"
        if _fingerprint(file) != expected:
            return f"{name} is not what was written"
    return None


def find(resume: str, directory: Path) -> tuple[Path | None, list[str]]:
    """The checkpoint that `resume` asks for (None: start anew), and a sentence on each one that was passed over.

    Raises `CheckpointError` if a named checkpoint is not complete, or if there are only broken ones.
    """
    if resume == "never":
        return None, []
    if resume != "auto":
        problem = check(Path(resume))
        if problem is not None:
            raise CheckpointError(f"{resume} {problem}; name a complete checkpoint, or set resume=auto")
        return Path(resume), []
    whole, skipped = complete(directory)
    if not whole and skipped:
        raise CheckpointError(f"no complete checkpoint in {directory}: " + "; ".join(skipped))
    return (whole[-1] if whole else None), skipped


def load(path: Path, distributed: Distributed) -> TrainerState:
    """Restore parameters and optimizer state in place; a collective. Returns the rest."""
    manifest = json.loads((path / MANIFEST).read_text())
    same = (distributed.world_size, distributed.zero_stage)
    saved = (manifest["world_size"], manifest["zero_stage"])
    if same != saved and (distributed.zero_stage or manifest["zero_stage"]):
        raise CheckpointError(
            f"{path} was saved by {saved[0]} ranks with ZeRO stage {saved[1]}, this run has {same[0]} ranks with stage "
            f"{same[1]}; start it with --num_processes {saved[0]} and the same accelerate config"
        )
    distributed.together(lambda: distributed.load_state(path))
    return TrainerState(**manifest["state"])


def _files(directory: Path) -> list[Path]:
    return sorted(file for file in directory.rglob("*") if file.is_file() and file.name != MANIFEST)


def _fingerprint(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"bytes": file.stat().st_size, "sha256": digest}


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
