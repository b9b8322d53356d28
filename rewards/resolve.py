"""Lookup of reward functions by name, and binding of their settings."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from lockstep.rewards.batches import GROUP_PARAMETER, BatchReward, is_group_wise
from lockstep.rewards.functions import FUNCTIONS
from lockstep.rewards.signatures import adapt, check_settings
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.system.user_functions import load_function, written_names

MODEL = "model"
"""Name of the reward function that runs a reward model (`rewards/model/reward.py`)."""


def resolve(spec: str, settings: Mapping[str, Any]) -> BatchReward:
    """Return a built-in function or that of `path/to/file.py:name` (which runs the file), with its settings bound.

    Raises `ConfigError`: no such function or file, the file cannot be loaded, or settings are unknown or missing.
    """
    if spec == MODEL:
        from lockstep.rewards.model.reward import model_reward  # imports torch and transformers
        from lockstep.rewards.model.settings import ModelSettings

        check_settings(spec, ModelSettings, settings)
        return model_reward(**settings)
    if spec not in FUNCTIONS and ":" not in spec:
        raise ConfigError(
            f"unknown reward function {spec!r}; expected one of {', '.join([*FUNCTIONS, MODEL])}, "
            "or path/to/file.py:function"
        )
    return adapt(spec.rpartition(":")[2], FUNCTIONS[spec] if spec in FUNCTIONS else load_function(spec), settings)


def compares_groups(spec: str) -> bool:
    """Return True if a built-in function, or one that a file of a user has in its text, is group-wise."""
    if spec in FUNCTIONS:
        return is_group_wise(FUNCTIONS[spec])
    parameters = written_names(spec).get(spec.rpartition(":")[2]) if ":" in spec else None
    return (parameters or ())[:1] == (GROUP_PARAMETER,)


def check_built_in(name: str, settings: Any) -> None:
    """Raise `ConfigError` for unknown or missing settings of a built-in, without loading anything for it."""
    if not isinstance(settings, Mapping):
        raise ConfigError(
            f"reward.settings.{name}={settings} is not a mapping of settings; set reward.settings.{name}.<name>=<value>"
        )
    if name == MODEL:
        from lockstep.rewards.model.settings import ModelSettings as function  # other rewards do not load it
    else:
        function = FUNCTIONS[name]
    if inspect.isclass(function):
        check_settings(name, function, settings)
        function(**settings)
    else:
        check_settings(name, function, settings, given=1)
