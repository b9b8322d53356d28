"""Write the tables of docs/stability.md from the settings, presets and commands that say that they are experimental.

    python -m scripts.project.list_stability            # also: make docs
    python -m scripts.project.list_stability --check    # write nothing; exit 1 if the page is out of date

A setting says it in its declaration, a file of configs/ in a comment `# Experimental: <reason>`, a command in a line
`Experimental: <reason>` of its docstring.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from lockstep.trainer.config.schema import Config
from lockstep.trainer.setting import declarations
from scripts.project.generated import ROOT, filled, main

PAGE = "docs/stability.md"


def settings() -> Iterator[tuple[str, str]]:
    for name, (setting, _) in declarations(Config()).items():
        if setting.experimental:
            yield name, setting.experimental


def files(pattern: str, mark: str) -> Iterator[tuple[str, str]]:
    """Yield path and reason of the files that have a line with a mark."""
    for path in sorted(ROOT.glob(pattern)):
        if path.is_file() and (line := re.search(rf"^{mark}Experimental: (.+)\.$", path.read_text(), re.MULTILINE)):
            yield str(path.relative_to(ROOT)), line[1]


def table(title: str, rows: Iterator[tuple[str, str]]) -> list[str]:
    return [f"| {title} | why |", "|---|---|", *(f"| `{name}` | {reason} |" for name, reason in rows)]


def page() -> str:
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    text = filled(text, "settings", table("setting", settings()))
    text = filled(text, "presets", table("file", files("configs/*/*", "# ")))
    return filled(text, "commands", table("command", files("scripts/*.py", "")))


PAGES = {PAGE: page}

if __name__ == "__main__":
    sys.exit(main(PAGES, (__doc__ or "").splitlines()[0]))
