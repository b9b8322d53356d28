"""Lookup of reward functions by name, and binding of their settings."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from lockstep.rewards.batches import GROUP_PARAMETER, BatchReward, group_wise, is_group_wise
from lockstep.rewards.functions.built_in import FUNCTIONS
from lockstep.rewards.model.settings import ModelSettings
from lockstep.rewards.trl import from_trl
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.system.user_functions import load_function, written_names

MODEL = "model"
"""Name of the reward function that runs a reward model (`rewards/model/reward.py`)."""
NOT_BY_NAME = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
"""Kinds of parameters that a setting cannot name."""


def resolve(spec: str, settings: Mapping[str, Any]) -> Callable[..., Any] | BatchReward:
    """Return a built-in function or that of `path/to/file.py:name` (which runs the file), with its settings bound.

    Raises `ConfigError`: no such function or file, the file cannot be loaded, or settings are unknown or missing.
    """
    if spec == MODEL:
        from lockstep.rewards.model.reward import (
            model_reward,
        )  # imports torch and transformers, which other rewards do not need

        check_settings(spec, ModelSettings, settings)
        return model_reward(**settings)
    if spec not in FUNCTIONS and ":" not in spec:
        raise ConfigError(
            f"unknown reward function {spec!r}; expected one of {', '.join([*FUNCTIONS, MODEL])}, "
            "or path/to/file.py:function"
        )
    if inspect.isclass(FUNCTIONS.get(spec)):
        check_settings(spec, FUNCTIONS[spec], settings)
        made = FUNCTIONS[spec](**settings)
        return group_wise(made, {}) if is_group_wise(made) else made
    function = FUNCTIONS[spec] if spec in FUNCTIONS else load_function(spec)
    if "completions" in inspect.signature(function).parameters:
        return from_trl(function, **settings)
    check_settings(spec.rpartition(":")[2], function, settings, given=1)
    if is_group_wise(function):
        return group_wise(function, settings)
    return functools.partial(function, **settings) if settings else function


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
    function = ModelSettings if name == MODEL else FUNCTIONS[name]
    if inspect.isclass(function):
        check_settings(name, function, settings)
        function(**settings)
    else:
        check_settings(name, function, settings, given=1)


def check_settings(name: str, function: Callable[..., Any], settings: Mapping[str, Any], *, given: int = 0) -> None:
    """Raise `ConfigError` unless the function can be called with `given` positional arguments and the settings."""
    signature = inspect.signature(function)
    try:
        signature.bind(*[None] * given, **settings)
        return
    except TypeError as error:
        problem = str(error)
    rest = list(signature.parameters.values())[given:]
    takes = [parameter.name for parameter in rest if parameter.kind not in NOT_BY_NAME]
    unknown = next((key for key in settings if key not in takes), None)
    missing = next((key for key in takes if key not in settings), "<name>")
    if unknown is None:
        raise ConfigError(f"reward {name}: {problem}; set reward.settings.{name}.{missing}=<value>")
    raise ConfigError(
        f"reward {name}: {problem}; it takes {', '.join(takes) or 'no settings'}: leave out "
        f"reward.settings.{name}.{unknown}"
    )
