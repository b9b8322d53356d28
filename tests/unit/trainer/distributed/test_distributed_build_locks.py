"""Stale build locks, which would make every later run wait forever."""

import os
import time
from pathlib import Path

import pytest

from lockstep.trainer.distributed.distributed import drop_stale_build_locks


def test_only_locks_too_old_to_have_an_owner_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    stale, fresh = tmp_path / "shm_comm" / "lock", tmp_path / "adam" / "lock"
    for lock in (stale, fresh):
        lock.parent.mkdir()
        lock.touch()
    os.utime(stale, (time.time() - 3600,) * 2)
    drop_stale_build_locks()
    assert not stale.exists()
    assert fresh.exists()
