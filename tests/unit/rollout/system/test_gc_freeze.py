"""What exists when a run begins is left out of collections, and comes back when it ends."""

from __future__ import annotations

import gc
import weakref

import pytest

from rollout.system.gc_freeze import collect_all, frozen


class Ring:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def nothing_frozen():
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_a_collection_leaves_what_was_there_before_alone():
    kept = Ring()
    ring = weakref.ref(kept)
    with frozen():
        del kept
        gc.collect()
        assert ring() is not None
        new = weakref.ref(Ring())
        gc.collect()
        assert new() is None
    gc.collect()
    assert ring() is None


def test_collecting_all_finds_what_was_frozen_and_freezes_the_rest_again():
    kept, stays = Ring(), Ring()
    ring = weakref.ref(kept)
    with frozen():
        del kept
        collect_all()
        assert ring() is None
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0
    assert stays.me is stays


def test_collecting_all_freezes_nothing_by_itself():
    ring = weakref.ref(Ring())
    collect_all()
    assert ring() is None
    assert gc.get_freeze_count() == 0


def test_what_fails_is_thawed_as_well():
    with pytest.raises(ValueError, match="a failed run"), frozen():
        raise ValueError("a failed run")
    assert gc.get_freeze_count() == 0
