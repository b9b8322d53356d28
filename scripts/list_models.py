"""Write the tables of docs/models.md: families, and the proofs of models with published configs.

python -m scripts.list_models            # also: make docs
python -m scripts.list_models --check    # write nothing; exit 1 if the page is out of date
"""

from __future__ import annotations

import json
import sys
from typing import Any

from lockstep.trainer.model.families import FAMILIES, Family
from scripts.generated import ROOT, filled, main
from scripts.published import RESULTS

PAGE = "docs/models.md"


def row(family: Family) -> str:
    types = ", ".join(f"`{name}`" for name in family.model_types)
    prefixes = "no" if family.is_recurrent else "yes"
    routes = ("yes" if family.replays_routes else "no") if family.has_experts else "–"
    adapters = "all but experts" if family.has_experts else "all"
    sent = "merged" if family.merges_adapters else "alone"
    cells = [family.title, types, family.layers or "–", prefixes, routes, adapters, sent]
    return f"| {' | '.join(cells)} |"


def proof_row(proof: dict[str, Any]) -> str:
    differences = [f"{value:.1e}" for value in proof["differences"]] or ["–"] * 3
    outcome = proof["refusal"].replace("|", "\\|") or ("equal" if proof["saved"] == 0.0 else f"{proof['saved']:.1e}")
    cells = [proof["family"], f"`{proof['model_type']}`", proof["checkpoint"], *differences, outcome]
    return f"| {' | '.join(cells)} |"


def models_page() -> str:
    """Return docs/models.md with its generated tables."""
    families = [
        "| family | model type | beside attention | prefixes shared and cached | engine's routes replayed | "
        "linear layers with adapters | adapters sent |",
        "|---|---|---|---|---|---|---|",
        *map(row, FAMILIES),
    ]
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    proofs = [
        f"| {versions} | model type | checkpoint | at first | after the first sync | after the second | saved model |",
        "|---|---|---|---|---|---|---|",
        *map(proof_row, results["proofs"]),
    ]
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    return filled(filled(page, "families", families), "published", proofs)


PAGES = {PAGE: models_page}

if __name__ == "__main__":
    sys.exit(main(PAGES, "write the tables of docs/models.md"))
