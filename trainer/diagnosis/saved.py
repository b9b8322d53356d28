"""Rollouts that a run has saved, and the settings that they must be scored with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rollout.errors import ConfigError
from rollout.records import Rollout
from rollout.saved_rollouts import read_rollouts

RUN_SETTINGS = (
    *("model.path", "model.dtype", "model.attn_implementation", "model.trust_remote_code", "token_budget"),
    "share_prefixes",
    *("rollout.temperature", "correction.mode", "correction.low", "correction.high", "data.path"),
)
"""What decides how saved rollouts are scored; anything else of their run does not matter to them."""

UNUSED_DATA = ("data.heldout_path=null", "eval.every=0")
"""Held-out data need not be there to look at what was sampled."""


def find_rollouts(path: Path) -> Path:
    """The file itself, or the first step in a run's directory or in its `rollouts/`.

    The first, because its tokens were sampled by the weights that the run started from, which `model.path` still has.
    Raises `ConfigError` if there is none.
    """
    if path.is_file():
        return path
    steps = sorted(path.glob("step-*.jsonl")) or sorted((path / "rollouts").glob("step-*.jsonl"))
    if not steps:
        raise ConfigError(
            f"--rollouts {path}: expected a file of saved rollouts or the directory of a run, found neither; "
            "runs save them with logger.save_rollouts=true"
        )
    return steps[0]


def load_rollouts(path: Path, *, limit: int) -> list[Rollout]:
    """The first `limit` rollouts of a file. Raises `DataError` if it holds something else, `ConfigError` if nothing."""
    rollouts: list[Rollout] = []
    for rollout in read_rollouts(path):
        rollouts.append(rollout)
        if len(rollouts) == limit:
            break
    if not rollouts:
        raise ConfigError(f"--rollouts {path}: the file is empty")
    return rollouts


def run_overrides(path: Path, given: Sequence[str]) -> list[str]:
    """Overrides that repeat the settings of the run a file belongs to, as far as the user gave none of their own.

    A run is recognised by its `config.yaml` beside `rollouts/`. Elsewhere the defaults count: no overrides.
    """
    config_path = path.resolve().parent.parent / "config.yaml"
    if path.resolve().parent.name != "rollouts" or not config_path.is_file():
        return []
    try:
        config = OmegaConf.load(config_path)
    except (OmegaConfBaseException, OSError) as error:
        raise ConfigError(f"{config_path} cannot be read: {error}") from error
    own = {override.partition("=")[0].lstrip("+~") for override in given}
    overrides = []
    for name in RUN_SETTINGS:
        value = OmegaConf.select(config, name)
        if name not in own and value is not None:
            overrides.append(f"{name}={_quoted(value)}")
    return overrides + [override for override in UNUSED_DATA if override.partition("=")[0] not in own]


def _quoted(value: object) -> str:
    """A value as Hydra's grammar reads it back: strings in quotes, so that any path is one word."""
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace("'", "\\'")
        return f"'{escaped}'"
    return str(value).lower() if isinstance(value, bool) else str(value)
