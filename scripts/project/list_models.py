"""Write the tables of docs/models.md, families and proofs of models with published configs, and proofs.json.

python -m scripts.project.list_models            # also: make docs
python -m scripts.project.list_models --check    # write nothing; exit 1 if the page is out of date
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import CONFIG_MAPPING

from lockstep.trainer.model.families import FAMILIES, Family, settings
from scripts.project.generated import ROOT, filled, main
from scripts.published import RESULTS
from scripts.published.models import published_models
from scripts.published.prove import MODES

PAGE = "docs/models.md"


def row(family: Family) -> str:
    types = ", ".join(f"`{name}`" for name in family.model_types)
    prefixes = "no" if family.is_recurrent else "yes"
    routes = ("yes" if family.replays_routes else "no") if family.has_experts else "–"
    adapters = "all but experts" if family.has_experts else "all"
    transfer = "merged" if family.merges_adapters else "alone"
    cells = [family.title, types, family.layers or "–", prefixes, routes, adapters, transfer]
    return f"| {' | '.join(cells)} |"


def proof_row(family: str, proofs: Mapping[str, dict[str, Any]]) -> str:
    """Return the row of a family. proofs: by mode."""
    plain = proofs["float32"]
    differences = [f"{value:.1e}" for value in plain["differences"]] or ["–"] * 3
    outcome = plain["refusal"].replace("|", "\\|") or ("equal" if plain["saved"] == 0.0 else f"{plain['saved']:.1e}")
    others = [ratio(proofs[mode]) if mode in proofs else "" for mode in MODES if mode != "float32"]
    versions = "; ".join(dict.fromkeys(", ".join(proof["versions"].values()) for proof in proofs.values()))
    cells = [family, f"`{plain['model_type']}`", plain["checkpoint"], *differences, outcome, *others, versions]
    return f"| {' | '.join(cells)} |"


def ratio(proof: dict[str, Any]) -> str:
    """Return the largest differences of a proof in bfloat16, as multiples of the floor."""
    engine, trainer = (
        max(difference / floor for difference, floor in zip(proof[name], proof["floors"], strict=True))
        for name in ("differences", "trained")
    )
    return f"{engine:.2f}, {trainer:.2f} × {max(proof['floors']):.1e}"


def models_page() -> str:
    """Return docs/models.md with its generated tables."""
    families = [
        "| family | model type | beside attention | prefixes shared and cached | engine's routes replayed | "
        "linear layers with adapters | adapters sent |",
        "|---|---|---|---|---|---|---|",
        *map(row, FAMILIES),
    ]
    by_family: dict[str, dict[str, dict[str, Any]]] = {}
    for proof in results():
        by_family.setdefault(proof["family"], {})[proof["mode"]] = proof
    modes = [mode.title for name, mode in MODES.items() if name != "float32"]
    heads = ["family", "model type", "checkpoint", "at first", "after the first sync", "after the second"]
    heads += ["saved model", *modes, ", ".join(results()[0]["versions"])]
    proofs = [
        f"| {' | '.join(heads)} |",
        "|---" * len(heads) + "|",
        *(proof_row(family, proofs) for family, proofs in by_family.items()),
    ]
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    return filled(filled(page, "families", families), "published", proofs)


def proofs_data() -> str:
    """Return proofs.json: of each model type with a proof, the values that the configs of its proofs set, as published
    and as reduced; a line each."""
    proven: dict[str, dict[str, set[str]]] = {}
    models = published_models()
    for family in dict.fromkeys(proof["family"] for proof in results() if not proof["refusal"]):
        one = models[family]
        for form in (one, replace(one, reduced={})):
            config = CONFIG_MAPPING[form.config["model_type"]].from_dict(form.config)
            values = proven.setdefault(config.get_text_config().model_type, {})
            for name, value in settings(config):
                values.setdefault(name, set()).add(value)
    lines = [
        f"{json.dumps(kind)}: {json.dumps({name: sorted(choices) for name, choices in sorted(values.items())})}"
        for kind, values in sorted(proven.items())
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def results() -> list[dict[str, Any]]:
    return json.loads(RESULTS.read_text(encoding="utf-8"))


PAGES = {PAGE: models_page, "lockstep/trainer/model/proofs.json": proofs_data}

if __name__ == "__main__":
    sys.exit(main(PAGES, "write the tables of docs/models.md, and proofs.json"))
