"""Write the table of docs/models.md from the families of trainer/model/families.py.

python -m scripts.list_models            # also: make docs
python -m scripts.list_models --check    # write nothing; exit 1 if the page is out of date
"""

from __future__ import annotations

import sys

from lockstep.trainer.model.families import FAMILIES, Family
from scripts.generated import ROOT, main

PAGE = "docs/models.md"
BEGIN, END = "<!-- families -->\n", "<!-- end of families -->"


def row(family: Family) -> str:
    types = ", ".join(f"`{name}`" for name in family.model_types)
    prefixes = "no" if family.is_recurrent else "yes"
    routes = ("yes" if family.replays_routes else "no") if family.has_experts else "–"
    adapters = "all but experts" if family.has_experts else "all"
    sent = "merged" if family.merges_adapters else "alone"
    cells = [family.title, types, family.layers or "–", prefixes, routes, adapters, sent]
    return f"| {' | '.join(cells)} |"


def models_page() -> str:
    """Return docs/models.md with its generated table."""
    before, _, rest = (ROOT / PAGE).read_text(encoding="utf-8").partition(BEGIN)
    _, found, after = rest.partition(END)
    assert found, f"{PAGE} lacks the markers of its table"
    head = [
        "| family | model type | beside attention | prefixes shared and cached | engine's routes replayed | "
        "linear layers with adapters | adapters sent |",
        "|---|---|---|---|---|---|---|",
    ]
    return before + BEGIN + "\n".join([*head, *map(row, FAMILIES)]) + "\n" + END + after


PAGES = {PAGE: models_page}

if __name__ == "__main__":
    sys.exit(main(PAGES, "write the table of docs/models.md"))
