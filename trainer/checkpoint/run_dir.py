"""The run directory: one place for everything a run leaves behind, never overwritten silently.

    runs/<name>/config.yaml           the resolved configuration, without secrets
                provenance.json       code version, packages, devices
                metrics.jsonl         one object per step
                rollouts/step-N.jsonl what was sampled, with token ids, logprobs and rewards
                evaluations/          results and rollouts of each evaluation
                checkpoints/step-N/   to resume from; `manifest.json` is written last
                dumps/                batches of updates that were refused (trainer/update/batch_dumps.py)
                model/                the trained policy, for `from_pretrained`
                critic/               with algorithm.advantage=gae: the critic, for model.critic_path
                logs/                 what the engine and other libraries said
                profile/              traces, with profile=true
    runs/latest                       link to the newest run

Rank 0 chooses the name and tells the others: each rank alone would resolve the time by itself.
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
import time
from pathlib import Path
from typing import IO

from omegaconf import OmegaConf

from rollout.errors import ConfigError
from trainer.checkpoint.resume import belongs_to
from trainer.config.redaction import redact
from trainer.config.schema import Config
from trainer.distributed.distributed import Distributed


@dataclasses.dataclass(frozen=True, slots=True)
class RunDirectory:
    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def evaluations(self) -> Path:
        return self.path / "evaluations"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def dumps(self) -> Path:
        return self.path / "dumps"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def critic(self) -> Path:
        return self.path / "critic"

    @property
    def provenance(self) -> Path:
        return self.path / "provenance.json"

    @property
    def profile(self) -> Path:
        return self.path / "profile"

    @property
    def logs(self) -> Path:
        return self.path / "logs"


def open_run(config: Config, distributed: Distributed) -> tuple[RunDirectory, IO[str] | None]:
    """Make or reopen the directory of this run; a collective.

    Returns the directory and, on rank 0, the open lock file: it is held while the process lives.
    Raises `ConfigError` on all ranks if the name is taken and the run is not to be resumed, or if another process
    is running in it.
    """
    lock: IO[str] | None = None

    def choose() -> str:
        nonlocal lock
        if not distributed.is_main:
            return ""
        root = Path(config.run_root)
        name = _free_name(root, config.environment.name) if config.run_name is None else config.run_name
        run = RunDirectory(root / name)
        if run.path.exists() and config.resume == "never":
            raise ConfigError(
                f"{run.path} exists and is not overwritten; set run_name=<another name>, or resume=auto to continue it"
            )
        of_another_run = config.resume not in ("never", "auto") and not belongs_to(config.resume, run.checkpoints)
        if of_another_run and run.path.exists():
            raise ConfigError(
                f"{run.path} exists, and resume={config.resume} is a checkpoint of another run; set run_name=<a new "
                "name> to begin a run from that checkpoint, or resume=auto to continue this one"
            )
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            lock = _lock(run)
            for directory in (run.rollouts, run.checkpoints, run.logs):
                directory.mkdir(exist_ok=True)
            shown = redact(OmegaConf.to_container(OmegaConf.structured(config)))
            run.config.write_text(OmegaConf.to_yaml(OmegaConf.create(shown)))
            _point_latest_at(run)
        except OSError as error:
            raise ConfigError(f"{run.path} cannot be written: {error}; set run_root=<a directory you own>") from error
        return str(run.path)

    path = distributed.broadcast(distributed.together(choose))
    return RunDirectory(Path(path)), lock


def _free_name(root: Path, label: str) -> str:
    name = f"{label}-{time.strftime('%Y%m%d-%H%M%S')}"
    return next(n for n in (name, *(f"{name}-{i}" for i in range(2, 1000))) if not (root / n).exists())


def _lock(run: RunDirectory) -> IO[str]:
    file = (run.path / ".lock").open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"another process is running in {run.path}; set run_name=<another name>") from None
    return file


def _point_latest_at(run: RunDirectory) -> None:
    latest = run.path.parent / "latest"
    temporary = run.path.parent / f".latest-{os.getpid()}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(run.path.name)
    temporary.replace(latest)
