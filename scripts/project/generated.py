"""Pages of docs/ that are generated from the code: writing them, and checking that they are up to date."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def filled(page: str, name: str, lines: Iterable[str]) -> str:
    """Return a page with these lines between its markers of this name."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, _, rest = page.partition(begin)
    _, marker, after = rest.partition(end)
    assert marker, f"the page lacks the markers of {name}"
    return before + begin + "\n".join(lines) + "\n" + end + after


def main(pages: Mapping[str, Callable[[], str]], description: str) -> int:
    """Run the command line of a script that writes these pages (paths below the repository); return its exit status."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is out of date")
    is_check, status = parser.parse_args().check, 0
    for name, page in pages.items():
        path, text = ROOT / name, page()
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        if is_check:
            print(f"{name} is not up to date; run: make docs", file=sys.stderr)
            status = 1
        else:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {name}")
    return status
