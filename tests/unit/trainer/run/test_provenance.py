"""Provenance of a run."""

from __future__ import annotations

from pathlib import Path

from trainer.run.provenance import code_version


def test_code_outside_git_has_no_commit(tmp_path: Path):
    assert code_version(tmp_path) == {"commit": None, "is_changed": None}
