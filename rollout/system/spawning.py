"""Children of `multiprocessing` that do not run the program which started them.

A child that is spawned first imports the main module of its parent, for functions that are defined there. vLLM's engine
needs none, and a program that trains outside of `if __name__ == "__main__"` would train again in each of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import spawn
from typing import Any


@contextmanager
def main_left_out() -> Iterator[None]:
    """Let children that are spawned in the block, by any thread, start without the main module."""
    prepare = spawn.get_preparation_data

    def prepared(name: str) -> dict[str, Any]:
        return {key: value for key, value in prepare(name).items() if not key.startswith("init_main_from_")}

    spawn.get_preparation_data = prepared
    try:
        yield
    finally:
        spawn.get_preparation_data = prepare
