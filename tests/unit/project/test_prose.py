"""`scripts/project/check_prose.py` finds what the rules of the house refuse, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.project import check_prose
from tests.fixtures.paths import ROOT


def found(text: str, name: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Lines and words of the findings in a file of this name."""
    (root / name).write_text(text)
    monkeypatch.setattr(check_prose, "ROOT", root)
    return [(line, words) for line, words, _ in check_prose.check_file(name)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('"""What a policy is."""', [(1, "What ...")]),
        ('x = 1\n"""Whether it is."""', [(2, "Whether ...")]),
        ("x = 1  # Of one.\n", [(1, "Of ...")]),
        ('"""A port.\n\nThat nobody\nwants anew."""', [(3, "nobody"), (4, "anew")]),
        ('f"at most so\\n" "so many"', [(1, "so many")]),
        ('"""It is no\nlist."""', [(1, "is no list")]),
        ('"there is no list, it is no longer one"', []),
        ("def normalise_colour(): ...", [(1, "normalise_colour")] * 2),
        ('"""Normalization of the behavior, a promise, an organism."""', []),
        ('RETOKENISE = "labelled"', [(1, "RETOKENISE"), (1, "labelled")]),
        ("# (P9), seed 003 and tokens.md rule 9", [(1, "(P9)"), (1, "seed 003"), (1, "tokens.md rule 9")]),
        ("# an A100 (G) of ../shared", [(1, "../shared")]),
        ('"cd /work/project"', [(1, "/work/")]),
        ("# https://example.org/work/items and docs/work.md", []),
        ("what = whether = None  # what a policy is", []),
    ],
)
def test_refused_words_are_found_in_python(
    text: str, expected: list[tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert found(text, "a.py", tmp_path, monkeypatch) == sorted(expected)


def test_a_participle_is_no_name_of_a_function_a_class_or_a_variable() -> None:
    source = "class _Found: pass\ndef read(): found = 1\nasync def shown(): pass\nclass Row: given: int"
    findings = [(line, name) for line, name, _ in check_prose.check_definitions(source)]
    assert findings == [(1, "_Found"), (2, "found"), (3, "shown")]


def test_pending_and_excepted_files_exist() -> None:
    for path, _, _ in check_prose.EXCEPTIONS:
        assert (ROOT / path).exists(), f"{path} has moved; change EXCEPTIONS"


def test_a_finding_names_its_place_and_fails_the_command(tmp_path: Path) -> None:
    (tmp_path / "scripts" / "project").mkdir(parents=True)
    (tmp_path / "scripts/project/check_prose.py").write_text((ROOT / "scripts/project/check_prose.py").read_text())
    (tmp_path / "page.md").write_text("fine\nnobody\n")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    command = [sys.executable, "scripts/project/check_prose.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert 'page.md:2: "nobody"; write instead: "no one"' in done.stdout
    (tmp_path / "page.md").unlink()
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 0
