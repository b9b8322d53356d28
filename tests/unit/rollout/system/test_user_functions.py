"""Loading of functions from user files."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from lockstep.rollout.errors import ConfigError
from lockstep.rollout.system import user_functions
from lockstep.rollout.system.user_functions import fault, load_function, load_functions, written_at, written_names


def test_a_user_file_imports_a_file_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside_it_7431.py").write_text("def helper(): return 3\n")
    (tmp_path / "own.py").write_text("from beside_it_7431 import helper\ndef score(rollout): return helper()\n")
    assert load_function(f"{tmp_path}/own.py:score")(None) == 3
    assert sys.path[-1] == str(tmp_path), "installed packages come first"


def test_caches_of_imports_can_be_cleared_after_a_user_file(tmp_path: Path):
    (tmp_path / "mine.py").write_text("def score(): return 1\n")
    load_function(f"{tmp_path}/mine.py:score")
    importlib.invalidate_caches()
    assert load_function(f"{tmp_path}/mine.py:score")() == 1


def test_a_user_file_imports_its_own_files_before_installed_packages_also_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Libraries import theirs. A folder without modules, as one of data, hides no package."""
    for folder, source in (("site", "installed"), ("own", "own")):
        for name in ("early_7431", "late_7431", "library_7431"):
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / f"{name}.py").write_text(f"WHERE = {source!r}\n")
    (tmp_path / "own" / "data_7431").mkdir()
    (tmp_path / "site" / "data_7431.py").write_text("WHERE = 'installed'\n")
    (tmp_path / "site" / "asks_7431.py").write_text(
        "def where():\n    import library_7431\n    return library_7431.WHERE\n"
    )
    (tmp_path / "own" / "other_7431.py").write_text("def where():\n    import late_7431\n    return late_7431.WHERE\n")
    (tmp_path / "own" / "my.py").write_text(
        "import asks_7431, data_7431, early_7431, importlib, other_7431\n"
        "def f():\n    found = [early_7431.WHERE, other_7431.where(), importlib.import_module('late_7431').WHERE]\n"
        "    return [*found, data_7431.WHERE, asks_7431.where()]\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "site")])
    monkeypatch.setattr(user_functions, "INSTALLED", (*user_functions.INSTALLED, str(tmp_path / "site")))
    function = load_function(f"{tmp_path}/own/my.py:f")
    assert function() == ["own", "own", "own", "installed", "installed"]


def test_a_spec_cut_at_its_comma_is_refused_with_the_quoted_form():
    with pytest.raises(ConfigError, match=r"found 'note', expected .*quote a spec with a comma: '\[\"path/to/file\.py"):
        load_functions("note")


WRITTEN = """
import json as j
from functools import partial

@partial
def f(rollouts, *, k=1):
    local = 1

try:
    async def g(rollout): ...
except ImportError:
    g = None

class C: ...

if (walrus := 1):
    h = lambda x: x
"""


def test_the_names_of_a_file_are_read_without_running_it(tmp_path: Path):
    file = tmp_path / "own.py"
    file.write_text(WRITTEN + "\nraise SystemExit\n")
    names = written_names(f"{file}:f")
    assert {name: value for name, value in names.items() if value is not None} == {
        "f": ("rollouts", "k"),
        "g": ("rollout",),
    }
    assert set(names) == {"j", "partial", "f", "g", "C", "walrus", "h"}
    for absent in ("local", "k", "absent", ""):
        with pytest.raises(ConfigError, match=f"has no function '{absent}'; it has f, g$"):
            written_names(f"{file}:{absent}")


@pytest.mark.parametrize(
    "source",
    ["from os import *", "globals()['f'] = 1", "setattr(m, 'f', 1)", "def g():\n    global f\n    f = 1", "exec(code)"],
)
def test_a_file_that_may_define_names_out_of_sight_lacks_none(source: str, tmp_path: Path):
    (tmp_path / "own.py").write_text(source)
    assert "f" not in written_names(f"{tmp_path}/own.py:f")


@pytest.mark.parametrize("content", [b"def f(:", b"\xff\xfe", b"x = 1\x00"])
def test_a_file_that_is_not_python_cannot_be_read(content: bytes, tmp_path: Path):
    (tmp_path / "own.py").write_bytes(content)
    with pytest.raises(ConfigError, match=r"own\.py cannot be loaded: "):
        written_names(f"{tmp_path}/own.py:f")


FAULTY = """
import ast
import json
from helper_5523 import helper

def parses(text):
    value = json.loads(text)
    return value

def evaluates(text):
    return ast.literal_eval(text)

def calls(text):
    return helper(text)

class Scorer:
    def __call__(self, text): return 1
"""


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("parses", "{", "JSONDecodeError in line 7 of {}/own.py: Expecting property name"),
        ("evaluates", "(", "SyntaxError in line 11 of {}/own.py: "),
        ("calls", "x", "ValueError in line 2 of {}/helper_5523.py: two lines"),
    ],
)
def test_a_fault_names_the_innermost_line_that_is_not_installed(
    name: str, text: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "helper_5523", raising=False)
    (tmp_path / "helper_5523.py").write_text("def helper(text):\n    raise ValueError('two\\nlines')\n")
    (tmp_path / "own.py").write_text(FAULTY)
    with pytest.raises(Exception) as raised:  # noqa: PT011 - of any kind
        load_function(f"{tmp_path}/own.py:{name}")(text)
    assert fault(raised.value).startswith(told.format(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert fault(raised.value).startswith(told.replace("{}/", ""))


def test_a_fault_of_lockstep_alone_names_no_line():
    with pytest.raises(ConfigError) as raised:
        load_function("nothing")
    raised.value.__traceback__ = raised.value.__traceback__.tb_next  # without this file
    assert fault(raised.value).startswith("ConfigError: found 'nothing'")


@pytest.mark.parametrize(("name", "line"), [("parses", "line 6 of "), ("Scorer", "line 16 of "), ("absent", "")])
def test_the_line_of_a_function_is_read_without_running_its_file(name: str, line: str, tmp_path: Path):
    (tmp_path / "own.py").write_text(FAULTY)
    assert written_at(f"{tmp_path}/own.py:{name}") == f"{line}{tmp_path}/own.py"
