"""Write docs/settings.md: every setting of `trainer/config/schema.py` with its default, meaning and unit.

    python scripts/list_settings.py            # also: make docs
    python scripts/list_settings.py --check    # exit 1 when the page is not what the code says

The page is generated, so it cannot contradict the code; edit the descriptions in trainer/config/schema.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

from trainer.config.schema import Config, DataSetConfig

PAGE = Path(__file__).resolve().parents[1] / "docs" / "settings.md"

HEADER = """# Settings

Every setting can be given on the command line: `python scripts/train.py optimizer.lr=1e-4`. The defaults below are
those of the schema; the files under `configs/` choose other values by group, for example `algorithm=dr_grpo`, and
`python scripts/train.py --cfg job` prints what results. This page is written by `make docs`.
"""


def row(prefix: str, field: dataclasses.Field, default: object) -> str:
    meaning = field.metadata["description"]
    if field.metadata["choices"]:
        meaning += "; one of " + ", ".join(f"`{choice}`" for choice in field.metadata["choices"])
    shown = yaml.safe_dump(default, default_flow_style=True, width=1000).removesuffix("...\n").strip()
    # A bar ends a table cell, even inside code.
    return " | ".join(["", f"`{prefix}{field.name}`", f"`{shown}`", meaning.replace("|", "\\|"), ""]).strip()


def rows(prefix: str, settings: object, *, with_groups: bool) -> Iterator[str]:
    """The fields of one dataclass instance, those of groups inside of it after its own."""
    fields = dataclasses.fields(settings)  # type: ignore[arg-type]
    values = {field.name: getattr(settings, field.name) for field in fields}
    yield from (row(prefix, field, values[field.name]) for field in fields if field.metadata)
    for name, value in values.items():
        if with_groups and dataclasses.is_dataclass(value):
            yield from rows(f"{prefix}{name}.", value, with_groups=True)


def table(prefix: str, settings: object, *, with_groups: bool = True) -> list[str]:
    """Markdown table of one dataclass instance."""
    return ["| setting | default | meaning |", "|---|---|---|", *rows(prefix, settings, with_groups=with_groups), ""]


def page() -> str:
    config = Config()
    lines = [HEADER, "## Top level", "", *table("", config, with_groups=False)]
    for field in dataclasses.fields(config):
        group = getattr(config, field.name)
        if dataclasses.is_dataclass(group):
            lines += [f"## {field.name}", "", *table(f"{field.name}.", group)]
    lines += ["## Entries of data.sources and eval.sets", "", *table("<name>.", DataSetConfig())]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write docs/settings.md from trainer/config/schema.py.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the page is out of date")
    if parser.parse_args().check:
        if PAGE.is_file() and PAGE.read_text() == page():
            return 0
        print("docs/settings.md is not what trainer/config/schema.py says; run: make docs", file=sys.stderr)
        return 1
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())
    print(f"wrote {PAGE.relative_to(Path.cwd()) if PAGE.is_relative_to(Path.cwd()) else PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
