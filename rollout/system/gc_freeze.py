"""Python's garbage collection, kept away from what a run has loaded.

A full collection looks at every object there is. Imports of torch, transformers and vLLM leave a million of them, which
took 0.4 to 0.5 s in about one update of ten (`benchmarks/compare_trl.py`). Objects that are frozen are not looked at.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen() -> Iterator[None]:
    """Leave what exists now out of collections, until the end."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def collect_all() -> None:
    """A full collection, also of what is frozen; what is left of that stays so."""
    was_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if was_frozen:
        gc.freeze()
