"""What a run has left that can be run again: its settings, the rollouts of a step, what it logged, its weights then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rollout.errors import ConfigError
from rollout.records import Rollout
from rollout.saved_rollouts import read_rollouts
from trainer.checkpoint import checkpoint
from trainer.checks.validate import validate
from trainer.cli import schema, to_config
from trainer.config.schema import Config, EvalConfig
from trainer.observe.metrics_log import BATCH, read_metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedStep:
    """One rollout batch of a run."""

    update: int
    """After it."""
    rollouts: tuple[Rollout, ...]
    logged: Mapping[str, float]
    """Its line in metrics.jsonl."""
    weights_update: int
    """Updates that had made the weights which it was scored and trained from."""

    @property
    def num_steps(self) -> int:
        """Rollout batches before it."""
        return int(self.logged[BATCH]) - 1


def settings_of(run: Path, overrides: Sequence[str]) -> Config:
    """The configuration of a run, with overrides as on the command line. Raises `ConfigError`."""
    path = run / "config.yaml"
    try:
        tree = OmegaConf.merge(schema(), OmegaConf.load(path), OmegaConf.from_dotlist(list(overrides)))
        config = to_config(tree)  # type: ignore[arg-type]
    except (OSError, OmegaConfBaseException, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} and {' '.join(overrides) or 'no overrides'} are no settings: {error}") from error
    config.resume, config.run_name = "never", None
    config.eval, config.data.heldout_path = EvalConfig(), None  # nothing is evaluated
    validate(config, needs_data=False)
    return config


def saved_step(run: Path, update: int) -> SavedStep:
    """The rollout batch that ended with this update. Raises `ConfigError` without it, `DataError` if it is damaged."""
    path = run / "rollouts" / f"step-{update:06d}.jsonl"
    if not path.is_file():
        saved = sorted((run / "rollouts").glob("step-*.jsonl"))
        there = f"there are {saved[0].stem} to {saved[-1].stem}" if saved else "none was saved"
        raise ConfigError(
            f"{path} is not there, {there}; name another --step, or set logger.save_rollouts=true in runs"
        )
    rollouts = tuple(read_rollouts(path))
    lines = read_metrics(run / "metrics.jsonl")
    # A batch that trained nothing has the update of the one before it; the first with this update made it.
    place = next((i for i, line in enumerate(lines) if line["step"] == update and BATCH in line), None)
    if place is None or not rollouts:
        raise ConfigError(f"{run / 'metrics.jsonl'} says nothing about update {update}; name another --step")
    spans = [span.version for rollout in rollouts for call in rollout.calls for span in call.version_spans]
    before = lines[place - 1]["step"] if place else min(spans, default=0)
    return SavedStep(update=update, rollouts=rollouts, logged=lines[place], weights_update=int(before))


def newest_checkpoint(run: Path, update: int) -> tuple[Path | None, int]:
    """The newest complete checkpoint of a run with at most so many updates, and how many it has; None is the base
    model, with 0."""
    numbers = (path.name.removeprefix("step-") for path in (run / "checkpoints").glob("step-*"))
    for number in sorted((int(n) for n in numbers if n.isdigit() and int(n) <= update), reverse=True):
        path = run / "checkpoints" / f"step-{number}"
        if checkpoint.check(path) is None:
            return path, number
    return None, 0
