"""Exclusion of loaded modules from garbage collection.

A full collection visits every object. Importing torch, transformers and vLLM leaves a million of them, which took 0.4
to 0.5 s in about one update of ten (`benchmarks/compare_trl.py`). Frozen objects are not visited.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_frozen() -> Iterator[None]:
    """Freeze current objects out of garbage collection for the duration of the block."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def gc_collect_all() -> None:
    """Run a full collection that includes frozen objects; survivors are frozen again."""
    was_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if was_frozen:
        gc.freeze()
