"""Rollouts that a run saved, and the settings to score them with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lockstep.rollout.errors import ConfigError
from lockstep.rollout.records import Rollout
from lockstep.rollout.saved_rollouts import read_rollouts
from lockstep.rollout.system.plain_files import behind_link
from lockstep.trainer.config.saved_config import read_saved

RUN_SETTINGS = (
    *("model.path", "model.dtype", "model.attn_implementation", "token_budget"),
    *("share_prefixes", "rollout.temperature", "correction.mode", "correction.low", "correction.high", "data.path"),
)
"""Settings of a run that decide how its rollouts are scored. `model.trust_remote_code` is not among them: others
may have written the run."""

UNUSED_DATA = {"data.heldout_path": None, "eval.every": 0}
"""Held-out data is not read, so it may be missing."""

MAX_ROLLOUTS = 64
"""Enough for stable numbers, few enough for a laptop."""


def find_rollouts(path: Path) -> Path:
    """Return the file itself, or the first step in a run's directory or in its `rollouts/`.

    Its tokens were sampled by the weights that the run started from, which `model.path` still holds. Raises
    `ConfigError` if there is none.
    """
    path = behind_link(path)
    if path.is_file():
        return path
    steps = sorted(path.glob("step-*.jsonl")) or sorted((path / "rollouts").glob("step-*.jsonl"))
    if not steps:
        raise ConfigError(
            f"--rollouts {path}: expected a file of saved rollouts or the directory of a run, found neither; "
            "runs save them with logger.save_rollouts=true"
        )
    return steps[0]


def load_rollouts(path: Path) -> tuple[Rollout, ...]:
    """Load at most `MAX_ROLLOUTS` rollouts. Raises `DataError` for other content, `ConfigError` for an empty file."""
    rollouts = tuple(islice(read_rollouts(path), MAX_ROLLOUTS))
    if not rollouts:
        raise ConfigError(f"--rollouts {path}: the file is empty")
    return rollouts


def run_overrides(path: Path, given: Sequence[str]) -> list[str]:
    """Return overrides that repeat the settings of the file's run, except those in the user's own overrides.

    A run is recognized by its `config.yaml` beside `rollouts/`; a file elsewhere is scored with the defaults.
    """
    config_path = path.resolve().parent.parent / "config.yaml"
    if path.resolve().parent.name != "rollouts" or not config_path.is_file():
        return []
    config = read_saved(config_path)
    try:
        settings = {name: OmegaConf.select(config, name) for name in RUN_SETTINGS}
    except OmegaConfBaseException as error:
        raise ConfigError(f"{config_path} cannot be read as settings: {error}") from error
    for name, value in settings.items():
        if not isinstance(value, str | int | float | None):
            raise ConfigError(
                f"{config_path}: {name} is {value}, expected a plain value; set {name} on the command line"
            )
    values = {name: value for name, value in settings.items() if value is not None} | UNUSED_DATA
    own = {override.partition("=")[0].lstrip("+~") for override in given}
    # JSON quotes strings, so that any path is one word of Hydra's grammar.
    return [f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in values.items() if name not in own]
