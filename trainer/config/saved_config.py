"""The config.yaml of a run, or the config.json of a checkpoint, which others may have written: read within limits, and
without interpolations.

Refused: `${...}`, which could read environment variables; YAML aliases, which grow without bound; deep nesting; large
files; tags. A run writes none of them.
"""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lockstep.rollout.errors import ConfigError
from lockstep.rollout.system.plain_files import read_plain

MAX_BYTES = 2**20
"""Maximum size: a hundred times that of a usual file."""
MAX_DEPTH = 64


def read_saved(path: Path) -> DictConfig:
    """Read a saved configuration. Raises `ConfigError`: the file is missing, damaged, or holds what no run writes."""
    try:
        text = read_plain(path, limit=MAX_BYTES)
        _check_events(path, text)
        tree = OmegaConf.create(json.loads(text) if path.suffix == ".json" else text)
    except (OSError, ValueError, TypeError, yaml.YAMLError, OmegaConfBaseException, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(f"{path} cannot be read as settings: {first}; restore the file that the run wrote") from error
    assert isinstance(tree, DictConfig)
    return tree


def _check_events(path: Path, text: str) -> None:
    depth, is_mapping = 0, False
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise ConfigError(f"{path} holds the alias *{event.anchor}, which no run writes; write its value instead")
        if isinstance(event, yaml.NodeEvent) and not is_mapping:
            is_mapping = isinstance(event, yaml.MappingStartEvent)
            if not is_mapping:
                break
        if isinstance(event, yaml.ScalarEvent) and "${" in event.value:
            raise ConfigError(
                f"{path} holds the interpolation {event.value!r}, which no run writes; write its value instead"
            )
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ConfigError(f"{path} is more than {MAX_DEPTH} levels deep, which no settings are")
    if not is_mapping:
        raise ConfigError(f"{path}: expected a mapping of settings; restore the file that the run wrote")
