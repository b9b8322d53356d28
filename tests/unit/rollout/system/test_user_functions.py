"""Functions of a user's own files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rollout.errors import ConfigError
from rollout.system.user_functions import load_function, load_functions


def test_a_file_may_import_the_one_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside_it_7431.py").write_text("def helper(): return 3\n")
    (tmp_path / "own.py").write_text("from beside_it_7431 import helper\ndef score(rollout): return helper()\n")
    assert load_function(f"{tmp_path}/own.py:score")(None) == 3
    assert sys.path[-1] == str(tmp_path), "installed packages come first"


def test_a_name_that_a_comma_cut_off_is_answered_with_the_quotes():
    with pytest.raises(ConfigError, match=r"found 'note', expected .*quotes of its own: '\[\"path/to/file\.py"):
        load_functions("note")
