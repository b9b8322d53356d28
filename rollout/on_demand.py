"""Registry by name that imports a module when its name is asked for: a run loads what its settings name."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

Value = TypeVar("Value")


class OnDemand(Mapping[str, Value], Generic[Value]):
    """Values by name, in a given order. Its names are known without an import."""

    def __init__(self, package: str, places: Mapping[str, str]) -> None:
        """package: full name. places: `module:attribute` within the package, by name."""
        self._package = package
        self._places = places

    def __getitem__(self, name: str) -> Value:
        module, attribute = self._places[name].split(":")
        return getattr(importlib.import_module(f"{self._package}.{module}"), attribute)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places
