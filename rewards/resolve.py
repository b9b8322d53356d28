"""From the name of a reward function in the settings to something that can be called."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rewards.functions import FUNCTIONS
from rewards.trl import BatchReward, from_trl, has_trl_signature
from rollout.errors import ConfigError
from rollout.loading import load_function

MODEL = "model"
"""Name of the reward that is a reward model (`rewards/model.py`)."""


def resolve(spec: str) -> tuple[str, Callable[..., Any]]:
    """Name and function of a built-in name or `path/to/file.py:name`. The latter runs the file, with all its rights.

    Raises:
        ConfigError: no such function or file, or the file cannot be loaded.
    """
    if spec == MODEL:
        from rewards.model import model_reward  # torch and transformers, which other rewards do not need

        return spec, model_reward
    if spec in FUNCTIONS:
        return spec, FUNCTIONS[spec]
    if ":" in spec:
        return spec.rpartition(":")[2], load_function(spec)
    raise ConfigError(
        f"unknown reward function {spec!r}; expected one of {', '.join([*FUNCTIONS, MODEL])}, "
        "or path/to/file.py:function"
    )


def configure(name: str, function: Callable[..., Any], settings: Mapping[str, Any]) -> Callable[..., Any] | BatchReward:
    """The function with its settings bound. Raises `ConfigError` for settings that it does not take, or lacks."""
    if name == MODEL:
        return function(**settings)
    if has_trl_signature(function):
        return from_trl(function, **settings)
    try:
        inspect.signature(function).bind(None, **settings)
    except TypeError as error:
        raise ConfigError(f"reward {name}: {error}; set it with reward.settings.{name}") from error
    return functools.partial(function, **settings) if settings else function
