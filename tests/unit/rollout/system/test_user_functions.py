"""Loading of functions from user files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rollout.errors import ConfigError
from rollout.system.user_functions import load_function, load_functions


def test_a_user_file_imports_a_file_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside_it_7431.py").write_text("def helper(): return 3\n")
    (tmp_path / "own.py").write_text("from beside_it_7431 import helper\ndef score(rollout): return helper()\n")
    assert load_function(f"{tmp_path}/own.py:score")(None) == 3
    assert sys.path[-1] == str(tmp_path), "installed packages come first"


def test_a_spec_cut_at_its_comma_is_refused_with_the_quoted_form():
    with pytest.raises(ConfigError, match=r"found 'note', expected .*quote a spec with a comma: '\[\"path/to/file\.py"):
        load_functions("note")
