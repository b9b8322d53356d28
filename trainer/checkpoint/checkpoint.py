"""Checkpoints that are whole or not there.

A checkpoint is written into a temporary directory; its manifest, with the size and SHA-256 of every file, comes last;
then the directory is renamed into place. What has no valid manifest is no checkpoint, and the loader names what it
skipped. Old checkpoints go only after a new one is published. At every moment of this, whatever kills the process, a
complete checkpoint is there that is at most one save old.

State is parameters, optimizer state, and a few numbers: updates done, rows taken, what controllers have seen. Data
order, sampling seeds, minibatch order and the learning rate are functions of these numbers and the configuration.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors import SafetensorError

from rollout.errors import CheckpointError, LockstepError
from trainer.config.changes import settings_hash
from trainer.distributed.distributed import Distributed

SCHEMA = 1
MANIFEST = "manifest.json"
CONFIG = "config.json"
"""The settings that the state was made with, without secrets: to say what was changed since."""
REPLACED = ".replaced"
"""End of the name of an older checkpoint of the same update, while a newer one takes its place."""
PARTIAL = ".partial-step-"
"""Beginning of the name of what is still being written."""
LATEST = "latest"
"""Link to the newest checkpoint, for people and scripts; the loader does not need it."""
RECORDED_VERSIONS = ("torch", "transformers", "accelerate", "deepspeed", "lockstep-rl")
LOADED_SUFFIXES = (".pt", ".safetensors")
UNREADABLE = (OSError, RuntimeError, ValueError, KeyError, EOFError, SafetensorError, pickle.UnpicklingError)
"""What loaders raise for a file that is damaged, of something else, or would run code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """Everything that is not a tensor and cannot be derived."""

    step: int
    """Rollout batches trained."""
    update: int
    """Optimizer updates done; also the version of the weights."""
    data_cursor: int
    """Data rows taken."""
    resting_rows: Mapping[str, int] = field(default_factory=dict)
    """Rows that a curriculum leaves out for now (`Prompts.resting`)."""
    unfinished: Sequence[int] = ()
    """Numbers of the rows among them that are not trained yet; a resumed run samples them first."""
    kl_coef: float | None = None
    """Weight of the KL penalty, where a controller adapts it."""
    wandb_id: str | None = None
    noise_floor: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the trainer against itself, as last measured."""
    grad_norms: Sequence[float] = ()
    """Of the last updates, what a spike is compared with."""
    skipped_updates: int = 0
    """Since the beginning of the run."""
    skipped_in_a_row: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError for what no run has written: a state is read from a file."""
        counts = [self.step, self.update, self.data_cursor, self.skipped_updates, self.skipped_in_a_row]
        if not isinstance(self.unfinished, list | tuple):
            raise ValueError("unfinished rows that are no list")
        counts += self.unfinished
        if not all(type(count) is int and count >= 0 for count in counts):
            raise ValueError("counts that are no counts")
        if not isinstance(self.noise_floor, Mapping) or not isinstance(self.grad_norms, list | tuple):
            raise ValueError("a noise floor or gradient norms of another type")
        if not all(type(value) in (int, float) for value in self.noise_floor.values()):
            raise ValueError("a noise floor of something else than numbers")
        finite = [*self.grad_norms, *([] if self.kl_coef is None else [self.kl_coef])]
        if not all(type(number) in (int, float) and math.isfinite(number) for number in finite):
            raise ValueError("numbers that are not finite")
        if not isinstance(self.wandb_id, str | None):
            raise ValueError("a W&B id that is no text")


def save(
    directory: Path,
    state: TrainerState,
    distributed: Distributed,
    *,
    keep: int,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write checkpoint `step-N` below `directory`, publish it, then drop all but the newest `keep`. A collective.

    config: of the run, without secrets; kept beside the state, and its hash in the manifest.
    Raises `CheckpointError` on all ranks if the disk is full or not writable; earlier checkpoints are untouched.
    """
    final = directory / f"step-{state.update}"
    temporary = directory / f"{PARTIAL}{state.update}"

    def prepare() -> None:
        if distributed.is_main:
            try:
                for left in directory.glob(f"{PARTIAL}*"):  # of killed saves: this run is the only one here
                    shutil.rmtree(left)
                temporary.mkdir(parents=True)
            except OSError as error:
                raise CheckpointError(f"{temporary} cannot be made: {error}") from error

    def write() -> None:
        try:
            distributed.save_state(temporary)
        except (OSError, RuntimeError, SafetensorError) as error:
            raise CheckpointError(f"checkpoint {final} cannot be written: {_cause(error, directory)}") from error

    def publish() -> None:
        if not distributed.is_main:
            return
        try:
            (temporary / "state.json").write_text(json.dumps(asdict(state), indent=2))
            if config is not None:
                (temporary / CONFIG).write_text(json.dumps(config, indent=2, default=str))
            manifest = {
                "schema": SCHEMA,
                "state": asdict(state),
                "world_size": distributed.world_size,
                "zero_stage": distributed.zero_stage,
                "config_hash": None if config is None else settings_hash(config),
                "versions": {package: _version(package) for package in RECORDED_VERSIONS},
                "files": {str(file.relative_to(temporary)): _fingerprint(file) for file in _files(temporary)},
            }
            (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2))
            for entry in [*temporary.rglob("*"), temporary]:
                _fsync(entry)
            _put_in_place(temporary, final)
            _retire(directory, final, keep)
        except OSError as error:
            raise CheckpointError(f"checkpoint {final} cannot be published: {_cause(error, directory)}") from error

    try:
        for phase in (prepare, write, publish):
            distributed.together(phase)
    except LockstepError:
        if distributed.is_main:
            shutil.rmtree(temporary, ignore_errors=True)  # it takes the room that the next try needs
        raise
    return final


def _put_in_place(temporary: Path, final: Path) -> None:
    """Rename. An older checkpoint of the same update stays loadable under another name until the new one is there."""
    replaced = final.with_name(f"{final.name}{REPLACED}")
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        final.rename(replaced)
    temporary.rename(final)
    _fsync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    link = final.parent / f".{LATEST}"
    link.unlink(missing_ok=True)
    link.symlink_to(final.name)
    link.replace(final.parent / LATEST)


def _retire(directory: Path, published: Path, keep: int) -> None:
    """Remove what is older than the newest `keep`. Never the one just published, also where a run that was resumed from
    an older update finds newer ones."""
    # By name alone: reading every kept byte again would cost minutes for a large model.
    numbered = {path: path.name.removeprefix("step-") for path in directory.glob("step-*") if path != published}
    others = sorted((path for path, number in numbered.items() if number.isdigit()), key=lambda p: int(numbered[p]))
    for old in others[: max(0, len(others) - (keep - 1))]:
        shutil.rmtree(old)


def complete(directory: Path) -> tuple[list[Path], list[str]]:
    """Checkpoints with a valid manifest, oldest first, and a sentence on each directory that is not one."""
    found: list[tuple[int, bool, Path]] = []
    skipped: list[str] = []
    for path in sorted(directory.glob("*step-*")) if directory.is_dir() else []:
        problem = check(path)
        if problem is None:
            update = json.loads((path / MANIFEST).read_text())["state"]["update"]
            found.append((update, not path.name.endswith(REPLACED), path))  # what took its place comes after it
        else:
            skipped.append(f"{path.name}: {problem}")
    return [path for *_, path in sorted(found)], skipped


def check(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None. Reads every byte of it."""
    if path.name.startswith(PARTIAL):
        return "was never finished"
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files = manifest["files"]
        TrainerState(**manifest["state"])
        if manifest["schema"] != SCHEMA:
            return f"has schema {manifest['schema']}, this version reads {SCHEMA}"
        if not isinstance(files, dict) or not all(_is_inside(name) for name in files):
            return "has a manifest that names files outside of it"
        if not all(type(manifest[name]) is int and manifest[name] >= 0 for name in ("world_size", "zero_stage")):
            return "has a manifest whose counts are no counts"
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        return f"has no readable manifest ({type(error).__name__})"
    for name, expected in files.items():
        file = path / name
        if not file.is_file():
            return f"lacks {name}"
        try:
            if _fingerprint(file) != expected:
                return f"{name} is not what was written"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    for file in _files(path):  # what a loader might read, and nobody vouches for
        if file.suffix in LOADED_SUFFIXES and str(file.relative_to(path)) not in files:
            return f"holds {file.relative_to(path)}, which its manifest does not name"
    return None


def find(resume: str, directory: Path) -> tuple[Path | None, list[str]]:
    """The checkpoint that `resume` asks for (None: start anew), and a sentence on each one that was passed over.

    A save that was killed before it was published is passed over: a job that is preempted in its first save, and queued
    again, starts anew.
    Raises `CheckpointError` if a named checkpoint is not complete, or if those that were published are all broken.
    """
    if resume == "never":
        return None, []
    if resume != "auto":
        problem = check(Path(resume))
        if problem is not None:
            raise CheckpointError(f"{resume} {problem}; name a complete checkpoint, or set resume=auto")
        return Path(resume), []
    whole, skipped = complete(directory)
    if not whole and any(not sentence.startswith(PARTIAL) for sentence in skipped):
        raise CheckpointError(f"no complete checkpoint in {directory}: " + "; ".join(skipped))
    return (whole[-1] if whole else None), skipped


def load(path: Path, distributed: Distributed) -> TrainerState:
    """Restore parameters and optimizer state in place; a collective. Returns the rest."""
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
    return TrainerState(**manifest["state"])


def is_resharded(path: Path, distributed: Distributed) -> bool:
    """Whether the shards of a complete checkpoint are not those of these ranks. Without ZeRO there are none."""
    manifest = json.loads((path / MANIFEST).read_text())
    saved = (manifest["world_size"], manifest["zero_stage"])
    own = (distributed.world_size, distributed.zero_stage)
    return saved != own and (saved[1] > 0 or own[1] > 0)


def saved_settings(path: Path) -> Mapping[str, Any] | None:
    """The configuration that a complete checkpoint was made with; None in those of versions that kept none."""
    try:
        settings = json.loads((path / CONFIG).read_text())
    except (OSError, ValueError):
        return None
    return settings if isinstance(settings, dict) else None


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and bool(path.parts)


def _cause(error: Exception, directory: Path) -> str:
    """What went wrong, and how much room there is: torch's error for a full disk does not mention it."""
    free = shutil.disk_usage(directory).free
    return f"{str(error).partition(chr(10))[0]} ({free / 2**20:.1f} MiB are free in {directory})"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


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
