"""Missing data files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.trainer.test_cli import composed
from trainer.checks.data import data_file_problems


def test_a_missing_held_out_file_can_be_left_out_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    missing = {problem.partition("=")[0]: problem for problem in data_file_problems(composed(), trains=True)}
    assert missing["data.heldout_path"].endswith("or data.heldout_path=null for no held-out data")
    assert "null" not in missing["data.path"]
    (problem,) = data_file_problems(composed(), trains=False)
    assert "null" not in problem, "an evaluation needs held-out data"
