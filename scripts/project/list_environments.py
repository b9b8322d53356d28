"""Write the table of traits in docs/environments.md from the declarations of the environments.

python -m scripts.project.list_environments            # also: make docs
python -m scripts.project.list_environments --check    # write nothing; exit 1 if the table is out of date
"""

from __future__ import annotations

import sys

from lockstep.rollout.environments import declaration, environment_names
from scripts.project.generated import ROOT, filled, main

PAGE = "docs/environments.md"
READS = {"prompt": "a prompt", "seed": "a seed", "row": "its own columns"}


def table() -> list[str]:
    """Return the lines of the table, environments that share all traits in one."""
    by_traits: dict[str, list[str]] = {}
    for name in environment_names():
        facts = declaration(name)
        if facts.has_parts:
            continue  # has the traits of its parts
        answers = "yes" if facts.is_deterministic else "no"
        traits = f"{READS[facts.reads]} | {facts.max_turns} | {facts.opens or 'nothing'} | {answers}"
        by_traits.setdefault(traits, []).append(f"`{name}`")
    lines = [f"| {', '.join(names)} | {traits} |" for traits, names in by_traits.items()]
    return [
        "| environment | reads of a row | turns by default | its settings open | same turns, same answers |",
        "|---|---|---|---|---|",
        *lines,
    ]


def page() -> str:
    return filled((ROOT / PAGE).read_text(encoding="utf-8"), "traits of environments", table())


PAGES = {PAGE: page}

if __name__ == "__main__":
    sys.exit(main(PAGES, (__doc__ or "").splitlines()[0]))
