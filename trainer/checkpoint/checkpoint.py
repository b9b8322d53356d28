"""Atomic checkpoints: complete, or ignored.

A checkpoint is written into a temporary directory; its manifest, with size and SHA-256 of every file, is written last;
then the directory is renamed into place. A directory without a valid manifest is skipped and reported (`stored.py`).
Old checkpoints are removed only after a new one is published. So a kill at any moment leaves a complete checkpoint that
is at most one save old.

State is parameters, optimizer state, and a few numbers: updates done, rows taken, state of controllers. Data order,
sampling seeds, minibatch order and learning rate are functions of these numbers and the configuration.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from lockstep.rollout.errors import CheckpointError, LockstepError
from lockstep.rollout.system.plain_files import LATEST
from lockstep.trainer.config.changes import settings_hash
from lockstep.trainer.distributed.distributed import Distributed

log = logging.getLogger(__name__)

SCHEMA = 1
MANIFEST = "manifest.json"
CONFIG = "config.json"
"""Settings of the run without secrets, for reporting changes on resume."""
REPLACED = ".replaced"
"""Suffix of an older checkpoint of the same update while a newer one replaces it."""
PARTIAL = ".partial-step-"
"""Prefix of a checkpoint that is still being written."""
"""Link to the newest checkpoint, for people and scripts; the loader does not use it."""
RECORDED_VERSIONS = ("torch", "transformers", "accelerate", "deepspeed", "lockstep-rl")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """State that is not a tensor and cannot be derived."""

    step: int
    """Rollout batches trained."""
    update: int
    """Optimizer updates done; also the weight version."""
    data_cursor: int
    """Data rows taken."""
    demonstrations_cursor: int = 0
    """Demonstrations taken."""
    data_skipped: Sequence[int] = ()
    """Data rows that a curriculum skipped, by data set."""
    data_rows: Sequence[int] = ()
    """Number of rows of each data set."""
    curriculum: Mapping[str, str] = field(default_factory=dict)
    """Records of the rows, by `set:row` (`trainer/data/curriculum.py`); empty without a curriculum."""
    unfinished: Sequence[int] = ()
    """Places of taken rows that are not trained yet; a resumed run samples them first."""
    kl_coef: float | None = None
    """Adapted weight of the KL penalty; None without a controller."""
    entropy_coef: float | None = None
    """Adapted weight of the entropy bonus; None in checkpoints from before the controller."""
    entropy: float | None = None
    """Mean entropy of the last update [nats], which decides whether the bonus acts; None without a controller."""
    wandb_id: str | None = None
    noise_floor: Mapping[str, float] = field(default_factory=dict)
    """Last measured noise floor, by metric."""
    grad_norms: Sequence[float] = ()
    """Gradient norms of the last updates, the baseline of spike detection."""
    skipped_updates: int = 0
    """Skipped updates since the start of the run."""
    skipped_in_a_row: int = 0

    def __post_init__(self) -> None:
        """Validate the fields, which are read from a file. Raises ValueError."""
        for name in ("data_skipped", "data_rows", "unfinished", "grad_norms"):
            if not isinstance(getattr(self, name), list | tuple):
                raise ValueError(f"{name}: expected a list, found {getattr(self, name)!r}")
        counts = [self.step, self.update, self.data_cursor, self.demonstrations_cursor]
        counts += [self.skipped_updates, self.skipped_in_a_row]
        if not isinstance(self.curriculum, Mapping):
            raise ValueError(f"curriculum: expected an object, found {self.curriculum!r}")
        if not all(isinstance(record, str) for record in self.curriculum.values()):
            raise ValueError("curriculum: expected a text per row")
        counts += [*self.data_skipped, *self.data_rows, *self.unfinished]
        if not all(type(count) is int and 0 <= count < 2**63 for count in counts):
            raise ValueError(f"expected non-negative integers of 64 bits, found {counts}")
        if not isinstance(self.noise_floor, Mapping):
            raise ValueError(f"noise_floor: expected an object, found {self.noise_floor!r}")
        if not all(type(value) in (int, float) for value in self.noise_floor.values()):
            raise ValueError(f"noise_floor: expected numbers, found {self.noise_floor}")
        controllers = (self.kl_coef, self.entropy_coef, self.entropy)
        finite = [*self.grad_norms, *(number for number in controllers if number is not None)]
        if not all(type(number) in (int, float) and math.isfinite(number) for number in finite):
            raise ValueError(f"grad_norms, kl_coef, entropy_coef, entropy: expected finite numbers, found {finite}")
        if not isinstance(self.wandb_id, str | None):
            raise ValueError(f"wandb_id: expected text, found {self.wandb_id!r}")

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> TrainerState:
        """Return the state of a manifest. Raises ValueError or TypeError if it is not one.

        Older versions wrote `resting_rows`, the first epoch in which a row is taken again: a record without visits.
        """
        if "resting_rows" not in values:
            return cls(**values)
        resting = values["resting_rows"]
        if not isinstance(resting, Mapping) or not all(
            type(epoch) is int and 0 <= epoch < 2**63 for epoch in resting.values()
        ):
            raise ValueError(f"resting_rows: expected an object of non-negative integers, found {resting!r}")
        others = {name: value for name, value in values.items() if name != "resting_rows"}
        return cls(**{"curriculum": {row: str(epoch) for row, epoch in resting.items()}, **others})


def save(
    directory: Path,
    state: TrainerState,
    distributed: Distributed,
    *,
    keep: int,
    config: Mapping[str, Any] | None = None,
    also: Callable[[Path], None] = lambda directory: None,
) -> Path:
    """Write checkpoint `step-N` below `directory`, publish it, then remove all but the newest `keep`; a collective.

    config: settings of the run without secrets, stored beside the state, with their hash in the manifest.
    also: writes further files, on all ranks.
    Raises `CheckpointError` on all ranks if the disk is full or not writable; earlier checkpoints are untouched.
    """
    final = directory / f"step-{state.update}"
    temporary = directory / f"{PARTIAL}{state.update}"

    def prepare() -> None:
        if distributed.is_main:
            try:
                for left in directory.glob(f"{PARTIAL}*"):  # of killed saves; no other run writes here
                    shutil.rmtree(left)
                temporary.mkdir(parents=True)
            except OSError as error:
                raise CheckpointError(f"{temporary} cannot be created: {error}") from error

    def write() -> None:
        try:
            distributed.save_state(temporary)
            also(temporary)
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
                "versions": {package: installed_version(package) or "not installed" for package in RECORDED_VERSIONS},
                "files": {str(file.relative_to(temporary)): fingerprint(file) for file in files_of(temporary)},
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
            shutil.rmtree(temporary, ignore_errors=True)  # free the space for the next attempt
        raise
    return final


def _put_in_place(temporary: Path, final: Path) -> None:
    """Rename into place. An older checkpoint of the same update stays loadable under another name until then."""
    backup = final.with_name(f"{final.name}{REPLACED}")
    _remove(backup, ignore_errors=True)
    if os.path.lexists(final):
        final.rename(backup)
    temporary.rename(final)
    _fsync(final.parent)
    _remove(backup, ignore_errors=True)
    point_latest_at(final)


def point_latest_at(path: Path) -> None:
    """Make the link `latest` beside a directory point at it. Anything else of that name is kept, with a warning."""
    latest = path.parent / LATEST
    if os.path.lexists(latest) and not latest.is_symlink():
        log.warning("%s is not a link, so it is kept and does not lead to %s; rename it", latest, path.name)
        return
    temporary = path.parent / f".{LATEST}-{os.getpid()}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(path.name)
    temporary.replace(latest)


def _remove(path: Path, *, ignore_errors: bool = False) -> None:
    """Remove a checkpoint; of one that was moved elsewhere, only the link. A file or nothing is left as it is."""
    if path.is_symlink():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path, ignore_errors=ignore_errors)


def _retire(directory: Path, published: Path, keep: int) -> None:
    """Remove all but the newest `keep`. Never removes the one just published, even if a run resumed from an older
    update finds newer ones."""
    # By name alone: verifying every kept byte would take minutes for a large model.
    numbers = {path: path.name.removeprefix("step-") for path in directory.glob("step-*") if path != published}
    others = sorted((path for path, number in numbers.items() if number.isdecimal()), key=lambda p: int(numbers[p]))
    for old in others[: max(0, len(others) - (keep - 1))]:
        _remove(old)


def belongs_to(path: str | Path, checkpoints: Path) -> bool:
    """True if a checkpoint lies in this directory of checkpoints."""
    return Path(path).resolve().parent == checkpoints.resolve()


def _cause(error: Exception, directory: Path) -> str:
    """Return the first line of an error and the free space, which torch's error for a full disk omits."""
    free = shutil.disk_usage(directory).free
    return f"{str(error).partition(chr(10))[0]} ({free / 2**20:.1f} MiB are free in {directory})"


def installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def files_of(directory: Path) -> list[Path]:
    return sorted(file for file in directory.rglob("*") if file.is_file() and file.name != MANIFEST)


def fingerprint(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"bytes": file.stat().st_size, "sha256": digest}


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
