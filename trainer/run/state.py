"""State of a run on disk: restored at the start, saved at checkpoints, and the model at the end."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.trainer.checkpoint import checkpoint
from lockstep.trainer.checkpoint.checkpoint import TrainerState
from lockstep.trainer.checkpoint.run_dir import ADAPTER, RunDirectory
from lockstep.trainer.checkpoint.user_files import UserFiles
from lockstep.trainer.compose import CONFIG_DIR
from lockstep.trainer.config.tree import plain
from lockstep.trainer.data.prompts import Position
from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.model.policy import is_adapted, policy_of
from lockstep.trainer.observe.console import RunConsole
from lockstep.trainer.observe.metrics_log import MetricsLog
from lockstep.trainer.observe.trackers.tracker import Lineage
from lockstep.trainer.observe.trackers.view import lockstep, program, short_path
from lockstep.trainer.run.assembly import Parts
from lockstep.trainer.run.next_steps import all_words, next_steps
from lockstep.trainer.run.provenance import provenance
from lockstep.trainer.update.entropy_control import EntropyControl

if TYPE_CHECKING:
    from lockstep.trainer.checkpoint.resume import Resumed
    from lockstep.trainer.distributed.weight_average import WeightAverage


def restore_state(
    path: Path, parts: Parts, directory: RunDirectory, console: RunConsole, files: UserFiles
) -> tuple[Resumed, UserFiles]:
    """Load a checkpoint; a collective. Returns the files of the user with what was changed since the run began."""
    from lockstep.trainer.checkpoint.resume import restore  # a new run does not load it

    sizes = parts.prompts.sizes if parts.prompts is not None else ()
    resumption = restore(path, parts.config, directory.checkpoints, parts.distributed, files=files, data_rows=sizes)
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
    return resumption, files.after(UserFiles.read(path), update=state.update)


def _load_average(average: WeightAverage, path: Path, distributed: Distributed) -> bool:
    """Restore the average of the policy, or begin it at the restored policy and return False; a collective."""
    average.restart()
    return distributed.together(lambda: average.load(path))


def open_metrics(
    parts: Parts, directory: RunDirectory, console: RunConsole, resumed: Resumed | None, files: UserFiles
) -> MetricsLog:
    """Open the logs on rank 0, after `restore_state`: lines after the restored update are dropped."""
    lineage = Lineage(run_id=parts.config.logger.wandb_id)
    if resumed is not None and lineage.run_id is None:
        state = resumed.state
        lineage = Lineage(run_id=state.wandb_id, update=state.update, is_same_run=not resumed.is_fork)
    origin = {**provenance(), "files": asdict(files)}
    directory.provenance.write_text(json.dumps(origin, indent=2) + "\n")
    run_config: dict[str, Any] = {**plain(parts.config), "provenance": origin}
    metrics = MetricsLog(directory.metrics, parts.config.logger, run_config=run_config, lineage=lineage)
    for tracker, place in metrics.places.items():
        console.say(f"{tracker:<14} {place}")
    metrics.truncate_after(update=parts.updater.num_updates, batch=parts.trainer.num_steps)
    return metrics


def state_of(parts: Parts, *, wandb_id: str | None) -> TrainerState:
    """Return the state between two steps, without tensors."""
    trainer, prompts, guard = parts.trainer, parts.prompts, parts.updater.guard
    position = prompts.position if prompts else Position()
    return TrainerState(
        step=trainer.num_steps,
        update=trainer.version,
        demonstrations_cursor=parts.demonstrations.cursor if parts.demonstrations else 0,
        data_cursor=position.cursor,
        data_skipped=position.skipped,
        data_rows=prompts.sizes if prompts else (),
        curriculum=prompts.curriculum.state() if prompts is not None and prompts.curriculum is not None else {},
        unfinished=position.unfinished,
        kl_coef=trainer.kl_coef,
        entropy_coef=parts.updater.entropy.coef,
        entropy=parts.updater.entropy.entropy,
        wandb_id=wandb_id,
        noise_floor=trainer.noise_floor,
        grad_norms=tuple(guard.norms),
        skipped_updates=guard.skipped,
        skipped_in_a_row=guard.in_a_row,
    )


def save_state(parts: Parts, directory: RunDirectory, state: TrainerState, files: UserFiles) -> None:
    """Write a checkpoint; a collective."""
    model = policy_of(parts.distributed.unwrapped).model

    def save_beside(place: Path) -> None:
        if parts.distributed.is_main:
            files.save(place)
        if is_adapted(model):
            from lockstep.trainer.model.lora import save_adapter

            save_adapter(model, place / ADAPTER, parts.distributed)
        if parts.averaged is not None:
            parts.averaged.average.save(place)

    checkpoint.save(
        directory.checkpoints, state, parts.distributed,
        keep=parts.config.checkpoint.keep, config=plain(parts.config), also=save_beside,
    )  # fmt: skip


def save_policy(distributed: Distributed, directory: Path, *, has_critic: bool) -> None:
    """Write the trained model, with its adapter merged unless the base is quantized; a collective."""
    policy = policy_of(distributed.unwrapped)
    if is_adapted(policy.model):
        from lockstep.trainer.model.lora import save_adapted

        save_adapted(policy.model, directory, distributed, merges=not policy.is_quantized)
    else:
        distributed.save_pretrained(directory, prefix="policy.model." if has_critic else "model.")


def save_model(
    parts: Parts, directory: RunDirectory, console: RunConsole, *, trackers: Mapping[str, str], outcome: str
) -> None:
    """Write the trained model and critic, print the commands that use them, and upload the model; a collective.

    trackers: location of the data of each tracker, and the command that shows them. outcome: what the run has reached;
    "": unknown.
    """
    config, distributed = parts.config, parts.distributed
    save_policy(distributed, directory.model, has_critic=config.plan.has_critic)
    has_saved_critic = False
    if config.plan.has_critic:
        from lockstep.trainer.model.critic import ActorCritic, save_critic

        module = distributed.unwrapped
        has_saved_critic = isinstance(module, ActorCritic) and save_critic(module, directory.critic, distributed)
    if not distributed.is_main:
        return
    parts.chat.save_pretrained(directory.model)
    update = parts.trainer.version
    if update < config.updates:
        console.say(f"stopped after update {update}; everything is saved")
    adapter = directory.model / ADAPTER if policy_of(distributed.unwrapped).is_quantized else None
    if outcome:
        console.say(
            f"{outcome}; the {'adapter' if adapter else 'model'} is in {short_path(adapter or directory.model)}"
        )
    console.say(
        next_steps(
            config,
            all_words(),
            run=directory.path,
            model=directory.model,
            adapter=adapter,
            update=update,
            launcher=launcher_of(distributed),
            critic=directory.critic if has_saved_critic else None,
            trackers=trackers,
        )
    )
    if config.hub.repo is not None and update >= config.updates:
        from lockstep.trainer.run.hub import publish  # other runs do not load it

        try:
            publish(directory.path, config.hub.repo, say=console.say)
        except Exception as error:  # the run is over and its model saved: only the remaining step is printed
            console.warn(str(error))


def launcher_of(distributed: Distributed) -> str:
    """Return the command in front of `train`."""
    if distributed.world_size == 1 and not distributed.zero_stage:
        return lockstep()
    file = f"zero{distributed.zero_stage}" if distributed.zero_stage else "ddp"
    processes = f"--num_processes {distributed.world_size}"
    if (hosts := os.environ.get("GROUP_WORLD_SIZE", "1")) != "1":
        file = "multi_node" if distributed.zero_stage == 3 else file
        processes += f" --num_machines {hosts} --machine_rank $NODE_RANK --main_process_ip {os.environ['MASTER_ADDR']}"
    config_file = shlex.quote(short_path(CONFIG_DIR / "accelerate" / f"{file}.yaml"))
    return f"{program('accelerate')} launch --config_file {config_file} {processes} -m lockstep"
