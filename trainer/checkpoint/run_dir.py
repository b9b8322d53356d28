"""The run directory, which holds everything that a run writes and is never overwritten silently.

    runs/<name>/config.yaml           the resolved configuration, without secrets
                provenance.json       code version, packages, devices
                metrics.jsonl         one object per step; asynchrony.jsonl: order of rollouts made ahead
                rollouts/step-N.jsonl sampled rollouts, with token ids, logprobs and rewards
                batches/N.jsonl       with rollouts made ahead: last batches and groups in flight, for resuming
                evaluations/          results and rollouts of each evaluation
                media/                images of prompts and tools, by digest
                checkpoints/step-N/   for resuming; `manifest.json` is written last
                dumps/                batches of refused updates (trainer/update/batch_dumps.py)
                model/                the trained policy, for `from_pretrained`
                hub/                  what was published: files of the model, and its card
                critic/               with algorithm.advantage=gae: the critic, for model.critic_path
                trackers/             files of TensorBoard, MLflow and SwanLab
                logs/                 output of the engine and other libraries
                profile/              traces, with profile=true
    runs/latest                       link to the newest run

Rank 0 chooses the name and broadcasts it, because a name may contain the time.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from omegaconf import OmegaConf

from lockstep.rollout.errors import ConfigError
from lockstep.rollout.system.plain_files import write_whole
from lockstep.rollout.system.user_functions import is_object, name_of
from lockstep.trainer.checkpoint.checkpoint import belongs_to, point_latest_at
from lockstep.trainer.command_line import command, settings_files
from lockstep.trainer.config.schema import Config
from lockstep.trainer.config.tree import plain
from lockstep.trainer.distributed.distributed import Distributed

ADAPTER = "adapter"
"""Directory of an adapter, in a checkpoint or beside the merged model."""
BATCHES = "batches"


class RunDirectory:
    """Paths in the directory of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.provenance = path / "provenance.json"
        self.metrics, self.asynchrony = path / "metrics.jsonl", path / "asynchrony.jsonl"
        self.rollouts, self.batches = path / "rollouts", path / BATCHES
        self.evaluations = path / "evaluations"
        self.media = path / "media"
        self.checkpoints = path / "checkpoints"
        self.dumps = path / "dumps"
        self.model = path / "model"
        self.hub = path / "hub"
        self.critic = path / "critic"
        self.logs = path / "logs"
        self.profile = path / "profile"


def open_run(config: Config, distributed: Distributed) -> tuple[RunDirectory, IO[str] | None]:
    """Create or reopen the directory of this run; a collective.

    Returns the directory and, on rank 0, the lock file, which must stay open while the run lasts. Raises `ConfigError`
    on all ranks if the name is taken and the run is not resumed, or if a run holds the lock.
    """
    lock: IO[str] | None = None

    def choose() -> str:
        nonlocal lock
        if not distributed.is_main:
            return ""
        root = Path(config.run_root)
        name = (
            _free_name(root, _label(config.environment.name, command())) if config.run_name is None else config.run_name
        )
        run = RunDirectory(root / name)
        if run.path.exists() and config.resume == "never":
            raise ConfigError(
                f"{run.path} exists and is not overwritten; set run_name=<another name>, or resume=auto to continue it"
            )
        of_another_run = config.resume not in ("never", "auto") and not belongs_to(config.resume, run.checkpoints)
        if of_another_run and run.path.exists():
            raise ConfigError(
                f"{run.path} exists, and resume={config.resume} is a checkpoint of another run; set run_name=<a new "
                "name> to start a run from that checkpoint, or resume=auto to continue this one"
            )
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            lock = _lock(run)
            for directory in (run.rollouts, run.checkpoints, run.logs):
                directory.mkdir(exist_ok=True)
            write_whole(run.config, OmegaConf.to_yaml(plain(config)).encode())  # a resume reads it
            point_latest_at(run.path)
        except OSError as error:
            raise ConfigError(f"{run.path} cannot be written: {error}; set run_root=<a directory you own>") from error
        return str(run.path)

    path = distributed.broadcast(distributed.together(choose))
    return RunDirectory(Path(path)), lock


def _label(environment: str, words: Sequence[str]) -> str:
    """Return the name of the settings file on a command line, else of the experiment, else of the environment."""
    experiment = [word.removeprefix("experiment=") for word in words if word.startswith("experiment=")]
    own = name_of(environment) if is_object(environment) else environment.rpartition(":")[0]
    names = settings_files(words) or experiment or [own or environment]
    return Path(names[-1]).stem


def _free_name(root: Path, label: str) -> str:
    """Return an unused name of a label and the time."""
    name = f"{label}-{time.strftime('%Y%m%d-%H%M%S')}"
    return next(n for n in (name, *(f"{name}-{i}" for i in range(2, 1000))) if not os.path.exists(root / n))


def _lock(run: RunDirectory) -> IO[str]:
    file = (run.path / ".lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        whose = "this" if file.read() == str(os.getpid()) else "another"
        raise ConfigError(f"{whose} process is running in {run.path}; set run_name=<another name>") from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file
