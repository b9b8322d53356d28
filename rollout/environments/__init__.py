"""Registry of environments by the name of a setting, or from a user's file. One instance lives for one episode.

The environment `name` is the class with a `declaration` in module `name` of one of the folders `PLACES`, or what an
installed package registers by this name:

    [project.entry-points."lockstep.environments"]
    chess = "my_package.chess:Chess"
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from lockstep.rollout.environments.declaration import Declaration, declaration_of
from lockstep.rollout.environments.mixed import AnyEnvironment, Mixed
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.safe_text import error_text
from lockstep.rollout.system.user_functions import is_object, load_function, object_named

PLACES = (__name__, "lockstep.integrations.environments", f"{__name__}.demo")
GROUP = "lockstep.environments"


def make_environment(name: str, **settings: Any) -> AnyEnvironment:
    """Make an environment for one episode. name: one of `environment_names()`, or `path/to/file.py:ClassName`.

    Raises `ConfigError`: the name is unknown, its file cannot be loaded, or it does not take these settings.
    """
    factory = load_function(name) if ":" in name else environment_class(name)
    if factory is None:
        raise ConfigError(
            f"unknown environment {name!r}; expected one of {', '.join(environment_names())}, or "
            "path/to/file.py:ClassName"
        )
    make = partial(factory, make=make_environment) if factory is Mixed else factory
    try:
        return make(**settings)
    except TypeError as error:
        takes = inspect.signature(factory)
        unknown = next((key for key in settings if key not in takes.parameters), "")
        near = get_close_matches(unknown, takes.parameters, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ConfigError(
            f"environment {name}: {error}{hint}; environment.settings are its arguments {takes}"
        ) from error


def environment_names() -> list[str]:
    """Return the names of all environments, those of installed packages last. Imports the modules of Lockstep's."""
    own = [name for name, module in _modules().items() if _declared_in(module) is not None]
    return list(dict.fromkeys([*own, *_entry_points(tuple(sys.path))]))


def environment_class(name: str) -> Any:
    """Return the class of a name; None if it is unknown, the path of a user's file, or a class that declares nothing.

    Raises `ConfigError` if the class of an installed package cannot be imported or declares nothing, or if two have
    this name.
    """
    if is_object(name):
        value = object_named(name)
        return value if hasattr(value, "declaration") else None
    own = own_class(name)
    entries = _entry_points(tuple(sys.path)).get(name, [])
    places = [f"{entry.value} of package {entry.dist.name if entry.dist else '?'}" for entry in entries]
    if len(entries) + (own is not None) > 1:
        keep = "all of these packages but one" if own is None else "these packages, as Lockstep has this name, too"
        raise ConfigError(
            f"environment {name!r} is registered by {' and '.join(places)}; uninstall {keep}, or set "
            "environment.name=path/to/file.py:ClassName"
        )
    if not entries:
        return own
    try:
        loaded_class = entries[0].load()
    except (Exception, SystemExit) as error:  # of a foreign module
        raise ConfigError(
            f"environment {name!r} cannot be imported from {places[0]}: {type(error).__name__}: {error_text(error)}"
        ) from error
    if not isinstance(loaded_class, type) or getattr(loaded_class, "declaration", None) is None:
        raise ConfigError(
            f"environment {name!r} is {places[0]}, which declares nothing; expected a class with declaration = "
            "Declaration(...) (docs/environments.md), or set environment.name=path/to/file.py:ClassName"
        )
    declaration_of(loaded_class)
    return loaded_class


def own_class(name: str) -> type | None:
    """Return the class of an environment of Lockstep's; None for any other name. Imports no other package."""
    module = _modules().get(name)
    return None if module is None else _declared_in(module)


def declaration(name: str) -> Declaration:
    """Return the declaration of an environment; the defaults for unknown names and users' files, which stay unread."""
    return declaration_of(environment_class(name))


def declared_parts(name: str, settings: Any) -> Iterator[tuple[str, Any, Declaration]]:
    """Yield name, settings and declaration of an environment, then those of the parts of a mixture."""
    own_declaration = declaration(name)
    yield name, settings, own_declaration
    parts = settings.get("environments") if own_declaration.has_parts and isinstance(settings, Mapping) else None
    for part, own in parts.items() if isinstance(parts, Mapping) else ():
        shared = {key: value for key, value in settings.items() if key != "environments"}
        yield from declared_parts(str(part), {**shared, **own} if isinstance(own, Mapping) else own)


@functools.cache
def _modules() -> dict[str, str]:
    """Return all modules that may declare an environment, by its name."""
    folders = [importlib.import_module(place) for place in PLACES]
    return {
        module.name: f"{folder.__name__}.{module.name}"
        for folder in folders
        for module in pkgutil.iter_modules(folder.__path__)
        if not module.ispkg
    }


def _declared_in(module: str) -> type | None:
    """Return the class of the module with a declaration of its own; None in modules of other use."""
    members = vars(importlib.import_module(module)).values()
    own = (one for one in members if isinstance(one, type) and one.__module__ == module and "declaration" in vars(one))
    return next(own, None)


@functools.cache  # reading the packages takes 10 ms, and each episode makes an environment
def _entry_points(path: tuple[str, ...]) -> dict[str, list[EntryPoint]]:
    """Return what installed packages register, by name. path: `sys.path`, in which they are found."""
    by_name: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=GROUP):
        by_name.setdefault(entry.name, []).append(entry)
    return by_name
