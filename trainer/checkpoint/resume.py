"""What `resume` asks for, and what it means for the run directory: go on, go back, or begin another run from there.

resume=auto                        go on with the newest complete checkpoint of run_name
resume=<runs/a/checkpoints/step-4> run_name=a     go back to it: what came after is written again
resume=<runs/a/checkpoints/step-4> run_name=b     a fork: a new run with its weights, optimizer and place in the
                                   data; `a` stays as it is
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.errors import CheckpointError
from trainer.checkpoint import checkpoint
from trainer.checkpoint.checkpoint import TrainerState
from trainer.config.changes import changes, flat
from trainer.config.schema import Config
from trainer.distributed.distributed import Distributed


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """State that was restored, and what a person should know about it."""

    path: Path
    state: TrainerState
    is_fork: bool
    """Whether the checkpoint is of another run."""
    kl_coef: float
    """Weight of the KL penalty to go on with."""
    warnings: tuple[str, ...] = ()


def belongs_to(path: str | Path, checkpoints: Path) -> bool:
    """Whether a checkpoint lies in this directory of checkpoints."""
    return Path(path).resolve().parent == checkpoints.resolve()


def restore(
    config: Config, settings: Mapping[str, Any], checkpoints: Path, distributed: Distributed
) -> tuple[Resumed | None, list[str]]:
    """Load what `config.resume` asks for into the prepared module and optimizer; a collective.

    settings: the configuration as a checkpoint keeps it.
    Returns None if the run begins anew, and a sentence on each checkpoint that was passed over.
    Raises `CheckpointError` on all ranks if the one that was asked for cannot be loaded.
    """
    path, skipped = distributed.together(lambda: checkpoint.find(config.resume, checkpoints))
    passed_over = [f"checkpoint passed over: {sentence}" for sentence in skipped]
    if path is None:
        return None, passed_over
    before = checkpoint.saved_settings(path) or {}
    _refuse_other_optimizer(path, before, config)
    state = checkpoint.load(path, distributed)
    kl_coef, warnings = _kl_coef(state, before, config)
    if checkpoint.is_resharded(path, distributed):
        warnings.append(
            f"{path.name} was saved by other ranks: parameters and moments are the same bits here, and sums over "
            f"{distributed.world_size} rank(s) with ZeRO stage {distributed.zero_stage} are rounded in another order "
            "from here on"
        )
    changed = changes(before, settings)
    if changed:
        listed = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in changed.items())
        warnings.append(f"settings that were changed since {path.name} was saved, and count from here on: {listed}")
    is_fork = not belongs_to(path, checkpoints)
    if not is_fork and config.resume != "auto":
        numbers = (other.name.removeprefix("step-") for other in checkpoints.glob("step-*"))
        newer = [f"step-{number}" for number in numbers if number.isdigit() and int(number) > state.update]
        if newer:
            warnings.append(
                f"{', '.join(sorted(newer))} came after {path.name}: resume=auto would take the newest of them, until "
                "this run has written them again"
            )
    resumed = Resumed(path=path, state=state, is_fork=is_fork, kl_coef=kl_coef, warnings=tuple(warnings))
    return resumed, passed_over


def _refuse_other_optimizer(path: Path, before: Mapping[str, Any], config: Config) -> None:
    """Raise `CheckpointError` if the moments in the checkpoint are another optimizer's."""
    saved = flat(before).get("optimizer.name", config.optimizer.name)
    if saved != config.optimizer.name:
        raise CheckpointError(
            f"optimizer.name={config.optimizer.name} cannot go on with the state of {saved} that {path} holds; set "
            f"optimizer.name={saved}, or begin anew from the model that the run has exported (model.path=)"
        )


def _kl_coef(state: TrainerState, before: Mapping[str, Any], config: Config) -> tuple[float, list[str]]:
    """The controller's own coefficient goes on, unless the user changed the setting: then that one counts."""
    algorithm = config.algorithm
    if algorithm.kl_target is None or state.kl_coef is None:
        return algorithm.kl_coef, []
    started_with = flat(before).get("algorithm.kl_coef", algorithm.kl_coef)
    if started_with == algorithm.kl_coef:
        return state.kl_coef, []
    return algorithm.kl_coef, [
        f"algorithm.kl_coef was changed from {started_with} to {algorithm.kl_coef}: the controller starts again from "
        f"there, and its coefficient of the checkpoint, {state.kl_coef:.6g}, is dropped; set "
        f"algorithm.kl_coef={started_with} to go on with it"
    ]
