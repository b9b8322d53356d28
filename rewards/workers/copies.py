"""Copies of reward functions of this process, `copy:name`, for worker processes: cloudpickle carries them there."""

from __future__ import annotations

import base64
import inspect
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle

from lockstep.rollout.errors import ConfigError
from lockstep.rollout.system.user_functions import keep, load_function, name_of


def pickled(spec: str) -> dict[str, str]:
    """Return what a worker needs to `unpickle` a spec. Raises `ConfigError` with the variable that cannot cross."""
    value = load_function(spec)
    try:
        return {"pickle": base64.b64encode(cloudpickle.dumps(value)).decode()}
    except Exception as error:  # of the object's own methods
        raise ConfigError(
            f"{name_of(spec)} cannot be copied to a worker process{_culprit(value)}: {error}; make that inside of the "
            "function, or leave out reward={'isolation': 'process'}, so that it runs in this process"
        ) from error


def unpickle(spec: str, content: Mapping[str, str]) -> None:
    """Keep the object that `pickled` wrote, in a worker. Raises `ConfigError` if it cannot be made there."""
    try:
        value = pickle.loads(base64.b64decode(content["pickle"]))  # noqa: S301  # written by the trainer, this parent
    except Exception as error:  # of the object's own methods
        raise ConfigError(
            f"{name_of(spec)} cannot be made in a worker process: {type(error).__name__}: {error}"
        ) from error
    keep({name_of(spec): value})


def _culprit(value: Callable[..., Any]) -> str:
    """Return the variable that the function uses and that cannot cross; empty if none alone is the reason."""
    try:
        used = inspect.getclosurevars(value)
    except TypeError:
        return ""
    for name, item in {**used.globals, **used.nonlocals}.items():
        try:
            cloudpickle.dumps(item)
        except Exception:
            return f" because of the variable {name} ({type(item).__name__})"
    return ""
