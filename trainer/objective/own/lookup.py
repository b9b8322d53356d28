"""Lookup of policy losses and advantages: built-in ones by name, a user's by `path/to/file.py:function`.

A plain function is enough; `@policy_loss(...)` and `@advantage(...)` say what it needs. Its settings are its
keyword-only arguments, set by `algorithm.loss_settings` and `algorithm.advantage_settings`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from lockstep.rollout.errors import ConfigError
from lockstep.rollout.system.user_functions import load_function, names_function
from lockstep.trainer.objective.advantages import ADVANTAGES
from lockstep.trainer.objective.declare import NEEDS, Advantage, Declared, PolicyLoss
from lockstep.trainer.objective.losses import POLICY_LOSSES
from lockstep.trainer.objective.own.outputs import checked_advantage, checked_critic_advantage, checked_loss
from lockstep.trainer.objective.own.signature import own_arguments

Kind = TypeVar("Kind", bound=Declared)


def policy_loss_named(name: str) -> PolicyLoss:
    """Return a policy loss. The file of a user's loss is run once per process.

    Raises `ConfigError`: the file cannot be loaded, or its function cannot be a loss.
    """
    if not names_function(name):
        return POLICY_LOSSES[name]
    objective = _declared(name, PolicyLoss, setting="loss", num_inputs=lambda loss: 1)
    return replace(objective, function=checked_loss(objective.function, name))


def advantage_named(name: str) -> Advantage:
    """Return an advantage estimator, as `policy_loss_named` does a loss."""
    if not names_function(name):
        return ADVANTAGES[name]
    objective = _declared(name, Advantage, setting="advantage", num_inputs=lambda found: 2 if found.needs_critic else 1)
    check = checked_critic_advantage if objective.needs_critic else checked_advantage
    return replace(objective, function=check(objective.function, name))


def is_advantage(name: str) -> bool:
    """Return True for an advantage, False for a loss: by the built-in name, the decorator, or the type of the inputs.

    Raises `ConfigError`: the name is neither, or the file cannot be loaded.
    """
    if not names_function(name):
        if name not in POLICY_LOSSES and name not in ADVANTAGES:
            names = ", ".join([*POLICY_LOSSES, *ADVANTAGES])
            raise ConfigError(f"{name} is not one of {names}; expected one of them, or path/to/file.py:function")
        return name in ADVANTAGES
    function = load_function(name)
    if function in NEEDS:
        return NEEDS[function][0] is Advantage
    annotations = [str(parameter.annotation) for parameter in inspect.signature(function).parameters.values()]
    return any(kind in text for text in annotations[:1] for kind in ("AdvantageInputs", "Credit"))


def _declared(spec: str, kind: type[Kind], *, setting: str, num_inputs: Callable[[Kind], int]) -> Kind:
    function = load_function(spec)
    decorator_kind, needs = NEEDS.get(function, (kind, {}))
    if decorator_kind is not kind:
        other = "advantage" if setting == "loss" else "loss"
        raise ConfigError(
            f"{spec} is decorated as the other kind; set algorithm.{other}={spec}, or change its decorator"
        )
    try:
        objective = kind(function=function, arguments={}, given_in=f"{setting}_settings", **needs)
        return replace(objective, arguments=own_arguments(function, num_inputs=num_inputs(objective)))
    except TypeError as error:
        raise ConfigError(f"{spec} cannot be a function for algorithm.{setting}: {error}") from error
