"""Dumps of skipped or suspicious optimizer steps, with everything that a replay needs.

    dumps/update-000012-try-1/batch.safetensors     rows and rollouts of the whole step, from all ranks
                              targets.safetensors   targets of each trained token
                              attempt.json          rollouts, learning rate, sums, gradient norm, reason
                              given-NAME.safetensors  rows of another component of the loss

Reading a dump runs no code. `lockstep replay` repeats the step with the weights of the checkpoint before it.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from lockstep.rollout.errors import DataError
from lockstep.rollout.system.plain_files import read_plain
from lockstep.trainer.batch.batch_bytes import decode, encode
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.config.groups.correction_settings import CorrectionConfig
from lockstep.trainer.credit.correction import StepCorrection
from lockstep.trainer.credit.old_policy import FromEngine, FromUpdate, Recomputed
from lockstep.trainer.credit.targets import Targets
from lockstep.trainer.objective.advantages.critic import Credit
from lockstep.trainer.update.update_guard import Attempt

BATCH, TARGETS, ATTEMPT = "batch.safetensors", "targets.safetensors", "attempt.json"
_CREDIT = "credit."
UNREADABLE = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
    SafetensorError,
)
"""Errors of readers for files that are damaged."""
_GIVEN, _SUFFIX = "given-", ".safetensors"


def write_dump(
    root: Path,
    attempt: Attempt,
    batch: StepBatch | None,
    targets: Targets | None,
    given: Mapping[str, StepBatch] | None = None,
) -> Path:
    """Write a directory below `root`, and replace one of the same name from before a resume.

    batch, targets: of the rollouts; None without. given: rows of other components, by name.
    """
    directory = root / attempt.name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    if batch is not None and targets is not None:
        (directory / BATCH).write_bytes(encode(batch))
        safetensors.torch.save_file(_tensors(targets), directory / TARGETS)
    for name, rows in (given or {}).items():
        (directory / f"{_GIVEN}{name}{_SUFFIX}").write_bytes(encode(rows))
    values = asdict(attempt)
    values |= {"grad_norm": _number(attempt.grad_norm), "sums": {k: _number(v) for k, v in attempt.sums.items()}}
    (directory / ATTEMPT).write_text(json.dumps(values, indent=2, allow_nan=False))
    return directory


def read_given(directory: Path) -> dict[str, StepBatch]:
    """Read the rows of other components in a dump, by name. Raises `DataError` if they are damaged."""
    try:
        return {
            path.name.removeprefix(_GIVEN).removesuffix(_SUFFIX): decode(_read_file(path))
            for path in sorted(directory.glob(f"{_GIVEN}*{_SUFFIX}"))
        }
    except UNREADABLE as error:
        raise DataError(f"{directory} is not a dumped batch: {type(error).__name__}: {error}") from error


def _read_file(path: Path) -> bytes:
    """Read a regular file; anything else, such as a pipe, could wait forever."""
    if not path.is_file():
        raise FileNotFoundError(f"{path.name} is not a regular file")
    return path.read_bytes()


def read_attempt(directory: Path) -> Attempt:
    """Read the attempt of a dump. Raises `DataError` if it is damaged."""
    try:
        values = json.loads(read_plain(directory / ATTEMPT))
        sums = {str(name): float(value) for name, value in values["sums"].items()}
        return Attempt(
            **values | {"rollouts": tuple(values["rollouts"]), "sums": sums, "grad_norm": float(values["grad_norm"])}
        )
    except UNREADABLE as error:
        raise DataError(f"{directory} is not a dumped batch: {type(error).__name__}: {error}") from error


def read_dump(directory: Path, settings: CorrectionConfig) -> tuple[Attempt, StepBatch, Targets]:
    """Read a dump. settings: of its run. Raises `DataError` if the directory is not an intact dump."""
    attempt = read_attempt(directory)
    try:
        for name in (BATCH, TARGETS):
            if not (directory / name).is_file():
                raise FileNotFoundError(f"{name} is missing, or no regular file")
        batch = decode((directory / BATCH).read_bytes())
        targets = _targets(safetensors.torch.load_file(directory / TARGETS), settings)
    except UNREADABLE as error:
        raise DataError(f"{directory} is not a dumped batch: {type(error).__name__}: {error}") from error
    return attempt, batch, targets


def _tensors(targets: Targets) -> dict[str, torch.Tensor]:
    tensors = {
        "advantages_N": targets.advantages_N,
        "old_logp_N": targets.old.logp_N,
        "weights_N": targets.correction.weights_N,
        "keep_N": targets.keep_N,
        "ref_logp_N": targets.ref_logp_N,
        "returns_N": targets.returns_N,
    }
    if targets.credit is not None:
        tensors |= {f"{_CREDIT}{field.name}": getattr(targets.credit, field.name) for field in fields(Credit)}
    return {name: tensor.clone() for name, tensor in tensors.items() if tensor is not None}


def _targets(tensors: dict[str, torch.Tensor], settings: CorrectionConfig) -> Targets:
    old_N, weights_N = tensors.pop("old_logp_N", None), tensors.pop("weights_N", None)
    form = FromEngine if settings.logp_old == "bypass" else Recomputed
    own = {name: tensor for name, tensor in tensors.items() if not name.startswith(_CREDIT)}
    credit = {name.removeprefix(_CREDIT): tensor for name, tensor in tensors.items() if name not in own}
    return Targets(
        old=FromUpdate() if old_N is None else form(old_N),
        correction=StepCorrection(settings=settings, weights_N=weights_N, keep_N=own.pop("keep_N")),
        credit=Credit(**credit) if credit else None,
        **own,
    )


def _number(value: float) -> Any:
    """Return the name of a non-finite value, because JSON has none; `float` reads it."""
    return value if math.isfinite(value) else str(value)
