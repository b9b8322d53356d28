"""Cases of hostile programs and functions: a file, with the expected result in its first comment.

The comment begins with the attack; each line `key: value` after it is an expectation. A program exits with status 0
and prints no line with "broke", unless a line says otherwise:

* `ended`: the allowed ends, by the values of `Ended`;
* `status`: the exit status, or minus the number of the signal;
* `prints`: the whole output;
* `runs`: how often the program runs in a row;
* `walls: none`: the result is the same without namespaces.

A function has `outcome`, a value of `Outcome`, and `says`, a part of the verdict's detail.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One hostile file."""

    path: Path
    expected: dict[str, str]

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def source(self) -> str:
        return self.path.read_text()


def cases(folder: str) -> dict[str, Case]:
    """Return the cases of a folder by name, in order."""
    return {path.stem: _case(path) for path in sorted((HERE / folder).glob("*.py"))}


def _case(path: Path) -> Case:
    attack, *lines = itertools.takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
    pairs = [line.removeprefix("# ").partition(": ") for line in lines]
    expected = {key: value for key, colon, value in pairs if colon}
    assert attack.endswith("."), f"{path}: the first line says the attack in a sentence"
    return Case(path=path, expected=expected)
