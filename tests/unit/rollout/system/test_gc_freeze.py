"""Exclusion of the objects that exist when a run begins from garbage collection, until it ends."""

from __future__ import annotations

import gc
import weakref

import pytest

from lockstep.rollout.system.gc_freeze import gc_collect_all, gc_frozen


class Ring:
    """Cyclic garbage, which only a collection frees."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def nothing_frozen():
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_a_collection_skips_frozen_objects_and_frees_new_garbage():
    kept = Ring()
    ring = weakref.ref(kept)
    with gc_frozen():
        del kept
        gc.collect()
        assert ring() is not None
        new = weakref.ref(Ring())
        gc.collect()
        assert new() is None
    gc.collect()
    assert ring() is None


def test_collecting_all_frees_frozen_garbage_and_freezes_survivors_again():
    kept, stays = Ring(), Ring()
    ring = weakref.ref(kept)
    with gc_frozen():
        del kept
        gc_collect_all()
        assert ring() is None
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0
    assert stays.me is stays


def test_collecting_all_freezes_nothing_that_was_not_frozen():
    ring = weakref.ref(Ring())
    gc_collect_all()
    assert ring() is None
    assert gc.get_freeze_count() == 0


def test_an_error_in_the_block_unfreezes_too():
    with pytest.raises(ValueError, match="a failed run"), gc_frozen():
        raise ValueError("a failed run")
    assert gc.get_freeze_count() == 0
