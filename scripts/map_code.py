"""Write docs/map.md: every module with the first sentence of its docstring, by package.

    python scripts/map_code.py            # also: make docs
    python scripts/map_code.py --check    # exit 1 when a module is missing from the page, or the page names a lost one

The page is generated, so a module describes itself in one place only: edit its docstring.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "map.md"
PACKAGES = ("rollout", "rewards", "trainer", "scripts")
HEADER = """# Map of the code

Every module in its own words: the first sentence of its docstring. Start with `rollout/records.py`, the records that
pass between stages, and `Trainer.step` in `trainer/step.py`, the way through one update. `rollout` and `rewards` import
nothing of `trainer`. This page is written by `make docs`.
"""


def modules(package: str) -> list[Path]:
    """All modules of a package and of those inside it, by path; empty `__init__` files are left out."""
    found = sorted((ROOT / package).rglob("*.py"), key=lambda path: (len(path.relative_to(ROOT).parts) > 2, path))
    return [path.relative_to(ROOT) for path in found if path.read_text(encoding="utf-8").strip()]


def sentence(module: Path) -> str:
    """The first sentence of the docstring, in one line."""
    text = ast.get_docstring(ast.parse((ROOT / module).read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[.:?])\s(?=[A-Z`])", paragraph)[0].rstrip(".:")


def page() -> str:
    lines = [HEADER]
    for package in PACKAGES:
        lines += [f"## {package}", "", "| module | what |", "|---|---|"]
        lines += [f"| `{module}` | {sentence(module).replace('|', chr(92) + '|')} |" for module in modules(package)]
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write docs/map.md from the docstrings of all modules.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the page is out of date")
    if not parser.parse_args().check:
        PAGE.write_text(page(), encoding="utf-8")
        print(f"wrote {PAGE.relative_to(ROOT)}")
        return 0
    named = set(re.findall(r"^\| `([\w/.]+\.py)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    there = {str(module) for package in PACKAGES for module in modules(package)}
    for module in sorted(named ^ there):
        print(f"docs/map.md {'lacks' if module in there else 'names a lost'} {module}; run: make docs", file=sys.stderr)
    return int(named != there)


if __name__ == "__main__":
    sys.exit(main())
