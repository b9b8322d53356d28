"""Resuming: continue a run, go back in it, or fork it.

resume=auto                                       continue from the newest complete checkpoint of run_name
resume=<runs/a/checkpoints/step-4> run_name=a     go back to it; later steps are overwritten
resume=<runs/a/checkpoints/step-4> run_name=b     fork: a new run with its weights, optimizer and place in the data;
                                                  `a` stays unchanged
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.rollout.errors import CheckpointError
from lockstep.trainer.checkpoint import checkpoint, stored
from lockstep.trainer.checkpoint.checkpoint import TrainerState
from lockstep.trainer.checkpoint.run_dir import BATCHES
from lockstep.trainer.checkpoint.user_files import UserFiles
from lockstep.trainer.config.changes import changes, flat
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.config.tree import plain
from lockstep.trainer.distributed.distributed import Distributed


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """Restored state, with warnings for the user."""

    path: Path
    state: TrainerState
    is_fork: bool
    """True if the checkpoint belongs to another run."""
    kl_coef: float
    """Weight of the KL penalty to continue with."""
    entropy_coef: float
    """Weight of the entropy bonus to continue with."""
    warnings: tuple[str, ...] = ()


def restore(
    path: Path,
    config: Config,
    checkpoints: Path,
    distributed: Distributed,
    *,
    files: UserFiles,
    data_rows: Sequence[int],
) -> Resumed:
    """Load a checkpoint into the prepared module and optimizer; a collective.

    checkpoints: directory of those of this run. files: those that this process read. data_rows: number of rows of each
    data set. Raises `CheckpointError` on all ranks if it cannot be loaded.
    """
    before = stored.saved_settings(path) or {}
    _refuse_other_optimizer(path, before, config.optimizer.name)
    state = stored.load(path, distributed)
    kl_coef, warnings = _continued("kl_coef", "kl_target", state.kl_coef, before, config.algorithm)
    entropy_coef, changed_entropy = _continued(
        "entropy_coef", "entropy_target", state.entropy_coef, before, config.algorithm
    )
    warnings += changed_entropy
    if stored.is_resharded(path, distributed):
        warnings.append(
            f"{path.name} was saved by other ranks: parameters and moments are restored bit for bit, but sums over "
            f"{distributed.world_size} rank(s) with ZeRO stage {distributed.zero_stage} round in another order from "
            "now on"
        )
    changed_settings = changes(before, plain(config))
    if changed_settings:
        listing = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in changed_settings.items())
        warnings.append(f"settings changed since {path.name} was saved, in effect from now on: {listing}")
        if "updates" in changed_settings and config.optimizer.schedule != "constant":
            warnings.append(
                f"from now on the learning rate follows its {config.optimizer.schedule} schedule over {config.updates} "
                "updates"
            )
    changed_files = files.changed_since(UserFiles.read(path))
    warnings += [
        f"{name} was changed after {path.name} was saved: the run used the earlier content up to update "
        f"{state.update}, and uses the new one from now on"
        for name in changed_files
    ]
    has_other_rows = bool(state.data_rows) and tuple(state.data_rows) != tuple(data_rows)
    if (changed_settings or changed_files or has_other_rows) and (checkpoints.parent / BATCHES).is_dir():
        if distributed.is_main:
            shutil.rmtree(checkpoints.parent / BATCHES)
        warnings.append("therefore what was collected after it, or was in flight, is sampled again")
    is_fork = not checkpoint.belongs_to(path, checkpoints)
    if not is_fork and config.resume != "auto":
        numbers = (other.name.removeprefix("step-") for other in checkpoints.glob("step-*"))
        newer = [f"step-{number}" for number in numbers if number.isdecimal() and int(number) > state.update]
        if newer:
            warnings.append(
                f"{', '.join(sorted(newer))} came after {path.name}: resume=auto takes the newest of them until this "
                "run has overwritten them"
            )
    return Resumed(
        path=path,
        state=state,
        is_fork=is_fork,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
        warnings=tuple(warnings),
    )


def _refuse_other_optimizer(path: Path, before: Mapping[str, Any], name: str) -> None:
    """Raise `CheckpointError` if the checkpoint has the moments of another optimizer."""
    saved_name = flat(before).get("optimizer.name", name)
    if saved_name != name:
        raise CheckpointError(
            f"optimizer.name={name} cannot load the state of {saved_name} that {path} holds; set "
            f"optimizer.name={saved_name}, or start a new run from the exported model (model.path=)"
        )


def _continued(
    name: str, target: str, saved: float | None, before: Mapping[str, Any], algorithm: AlgorithmConfig
) -> tuple[float, list[str]]:
    """Return the coefficient of a controller, or the setting if the user changed it, and warnings.

    name, target: settings of `algorithm`. saved: the coefficient of the checkpoint.
    """
    now = getattr(algorithm, name)
    if getattr(algorithm, target) is None or saved is None:
        return now, []
    started_with = flat(before).get(f"algorithm.{name}", now)
    if started_with == now:
        return saved, []
    return now, [
        f"algorithm.{name} was changed from {started_with} to {now}: the controller restarts from the new value and "
        f"drops the checkpoint's coefficient, {saved:.6g}; set algorithm.{name}={started_with} to keep it"
    ]
