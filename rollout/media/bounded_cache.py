"""Cache of what takes much memory: values by name, the most recently used, up to a number of bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from threading import Lock
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class BoundedCache(Generic[T]):
    """Function of a name whose values are kept. Threads may share it; two that come at once may both compute."""

    def __init__(self, make: Callable[[str], T], *, size: Callable[[T], int], limit: int) -> None:
        """size: bytes of a value. limit: bytes of all values; the last one is kept in any case."""
        self._make, self._size, self._limit = make, size, limit
        self._values: OrderedDict[str, T] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()

    def __call__(self, name: str) -> T:
        """Return the value, kept or made. Raises what making it raises."""
        with self._lock:
            if name in self._values:
                self._values.move_to_end(name)
                return self._values[name]
        value = self._make(name)
        self.keep(name, value)
        return value

    def keep(self, name: str, value: T) -> None:
        with self._lock:
            if name not in self._values:
                self._bytes += self._size(value)
            self._values[name] = value
            self._values.move_to_end(name)
            while self._bytes > self._limit and len(self._values) > 1:
                _, dropped = self._values.popitem(last=False)
                self._bytes -= self._size(dropped)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, name: str) -> bool:
        return name in self._values


def bytes_of(tensors: Mapping[str, torch.Tensor]) -> int:
    """Return the memory of tensors."""
    return sum(tensor.nbytes for tensor in tensors.values())
