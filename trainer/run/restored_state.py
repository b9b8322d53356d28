"""Restored state of a resumed run, with a sentence on everything that differs from the run before."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.trainer.checkpoint.resume import Resumed, restore
from lockstep.trainer.checkpoint.run_dir import RunDirectory
from lockstep.trainer.checkpoint.user_files import UserFiles
from lockstep.trainer.config.tree import plain
from lockstep.trainer.data.prompts import Position
from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.observe.console import RunConsole
from lockstep.trainer.run.assembly import Parts
from lockstep.trainer.update.entropy_control import EntropyControl

if TYPE_CHECKING:
    from lockstep.trainer.distributed.weight_average import WeightAverage


def restore_state(
    path: Path, parts: Parts, directory: RunDirectory, console: RunConsole, files: UserFiles
) -> tuple[Resumed, UserFiles]:
    """Load a checkpoint; a collective. Returns the files of the user with what was changed since the run began."""
    resumption = restore(path, parts.config, plain(parts.config), directory.checkpoints, parts.distributed)
    state, guard = resumption.state, parts.updater.guard
    parts.trainer.num_steps = state.step
    parts.updater.num_updates = state.update
    parts.trainer.kl_coef = resumption.kl_coef
    parts.updater.entropy = EntropyControl(coef=resumption.entropy_coef, entropy=state.entropy)
    parts.trainer.noise_floor = state.noise_floor
    other_data = None
    if parts.prompts is not None:
        position = Position(
            cursor=state.data_cursor, skipped=tuple(state.data_skipped), unfinished=tuple(state.unfinished)
        )
        other_data = parts.prompts.resume(position, state.curriculum, state.data_rows)
    if parts.demonstrations is not None:
        parts.demonstrations.cursor = state.demonstrations_cursor
    if parts.averaged is not None and not _load_average(parts.averaged.average, resumption.path, parts.distributed):
        console.warn(f"{resumption.path} has no average of the policy: the teacher begins at the policy that it holds")
    guard.norms.extend(state.grad_norms)
    guard.skipped, guard.in_a_row = state.skipped_updates, state.skipped_in_a_row
    console.say(f"{'forked' if resumption.is_fork else 'resumed'} from {resumption.path} at update {state.update}")
    for sentence in (*resumption.warnings, *filter(None, [other_data])):
        console.warn(sentence)
    before = UserFiles.read(path)
    for name in files.changed_since(before):
        console.warn(
            f"{name} was changed after {path.name} was saved: the run used the earlier content up to update "
            f"{state.update}, and uses the new one from now on"
        )
    return resumption, files.after(before, update=state.update)


def _load_average(average: WeightAverage, path: Path, distributed: Distributed) -> bool:
    """Restore the average of the policy, or begin it at the restored policy and return False; a collective."""
    average.restart()
    return distributed.together(lambda: average.load(path))
