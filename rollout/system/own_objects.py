"""Functions, classes and rows of the program that called `lockstep.train`, by the names that settings hold for them.

    object:short    the function `short`, called in this process
    copy:short      a copy of it that worker processes call: cloudpickle carries it there, and nothing back

Both mean something to this process alone: a run whose settings name one is continued by the program that began it.
"""

from __future__ import annotations

import base64
import hashlib
import inspect
import pickle
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lockstep.rollout.errors import ConfigError

OBJECT, COPY = "object:", "copy:"

_objects: dict[str, Any] = {}
_IN_WORD = re.compile(rf"[=\[\s:]'?({OBJECT}|{COPY})\w")


def is_object(text: str) -> bool:
    """Return True for `object:name` and `copy:name`."""
    return text.startswith((OBJECT, COPY))


def holds_objects(words: Iterable[str]) -> bool:
    """Return True if a word of a command line sets a setting to an object, or to a list with one."""
    return any(_IN_WORD.search(word) for word in words)


def name_of(spec: str) -> str:
    """Return the name in `object:name` or `copy:name`."""
    return spec.partition(":")[2]


def keep(objects: Mapping[str, Any]) -> None:
    """Keep objects by name, each in place of an earlier one with its name: a cell that runs again has new functions."""
    _objects.update(objects)


def object_named(spec: str) -> Any:
    """Return the object of `object:name` or `copy:name`. Raises `ConfigError` where it was not kept."""
    if problem := object_problem(spec):
        raise ConfigError(problem)
    return _objects[name_of(spec)]


def object_problem(spec: str) -> str | None:
    """Return a sentence if no object of this name is kept in this process; None if one is."""
    if name_of(spec) in _objects:
        return None
    return (
        f"found {spec}, an object of the program that called lockstep.train, which no other process has; continue the "
        "run in that program: lockstep.train(<the same arguments>, resume='auto', run_name=<name of the run>)"
    )


def source_sha256(spec: str) -> str:
    """Return the SHA-256 of the source of a function, or of its code where there is no source."""
    value = object_named(spec)
    try:
        text = inspect.getsource(value).encode()
    except (OSError, TypeError):
        text = getattr(getattr(value, "__code__", None), "co_code", repr(type(value)).encode())
    return hashlib.sha256(text).hexdigest()


def pickled(spec: str) -> dict[str, str]:
    """Return what a worker needs to `unpickle` a spec; empty for one that is not `copy:name`.

    Raises `ConfigError` that names the variable which cannot cross, if one cannot.
    """
    if not spec.startswith(COPY):
        return {}
    value = object_named(spec)
    try:
        return {"pickle": base64.b64encode(_dumps(value)).decode()}
    except Exception as error:  # of the object's own methods
        raise ConfigError(
            f"{name_of(spec)} cannot be copied to a worker process{_culprit(value)}: {error}; make that inside of the "
            "function, or leave out reward={'isolation': 'process'}, so that it runs in this process"
        ) from error


def unpickle(spec: str, content: Mapping[str, str]) -> None:
    """Keep the object that `pickled` wrote, in a worker. Raises `ConfigError` if it cannot be made there."""
    if "pickle" not in content:
        return
    try:
        value = pickle.loads(base64.b64decode(content["pickle"]))  # noqa: S301  # written by the trainer, this parent
    except Exception as error:  # of the object's own methods
        raise ConfigError(
            f"{name_of(spec)} cannot be made in a worker process: {type(error).__name__}: {error}"
        ) from error
    keep({name_of(spec): value})


def _dumps(value: Any) -> bytes:
    import cloudpickle  # other runs do not load it

    return cloudpickle.dumps(value)


def _culprit(value: Callable[..., Any]) -> str:
    """Return the variable that the function uses and that cannot cross; empty if none alone is the reason."""
    try:
        used = inspect.getclosurevars(value)
    except TypeError:
        return ""
    for name, item in {**used.globals, **used.nonlocals}.items():
        try:
            _dumps(item)
        except Exception:
            return f" because of the variable {name} ({type(item).__name__})"
    return ""
