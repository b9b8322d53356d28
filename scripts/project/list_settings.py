"""Write docs/settings.md and the tables of docs/algorithms.md from the declarations of settings, losses and advantages.

    python -m scripts.project.list_settings            # also: make docs
    python -m scripts.project.list_settings --check    # write nothing; exit 1 if a page is out of date

The tables are generated. To change one, edit trainer/config/schema.py and its groups, the files of
trainer/objective/losses and advantages, or the header of a preset in configs/algorithm.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator, Mapping

import yaml

from lockstep.trainer.config.conditions import LEARNS_FROM_TEACHER, ROLLOUTS
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.config.groups.data_settings import DataSetConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.objective.declare import ADVANTAGES, POLICY_LOSSES, Declared
from lockstep.trainer.setting import Setting, typed
from scripts.project.generated import ROOT, main

ALGORITHMS = "docs/algorithms.md"

HEADER = """# Settings

Every setting can be given on the command line: `lockstep train experiment=demo optimizer.lr=1e-4`, and in
[a file of your own](settings_file.md): `lockstep train my_run.yaml optimizer.lr=1e-4`. The
defaults below are those of the schema; the files under `configs/` choose other values by group, for example
`algorithm=dr_grpo`, and `lockstep train experiment=demo --cfg job` prints the result. This page is written by
`make docs`.
"""


def meaning(declared: Setting) -> str:
    text = declared.description
    if declared.choices:
        text += "; one of " + ", ".join(f"`{choice}`" for choice in declared.choices)
    if declared.or_function:
        text += ", or `path/to/file.py:function`"
    if declared.range:
        text += f" ({declared.range})"
    if declared.when is ROLLOUTS:
        text += ". Not with `algorithm=sft`"
    elif declared.when is not None and not declared.when.instead.startswith("it for"):
        counts = "With `algorithm=sft` counts" if declared.when is LEARNS_FROM_TEACHER else "Counts"
        text += f". {counts} with `{declared.when.instead}`"
    if declared.experimental:
        text += f". *Experimental*: {declared.experimental}"
    return text


def row(name: str, declared: Setting, default: object) -> str:
    text = yaml.safe_dump(default, default_flow_style=True, width=1000).removesuffix("...\n").strip()
    return cells(f"`{name}`", "required" if declared.example else f"`{text}`", meaning(declared))


def cells(*texts: str) -> str:
    # A bar ends a table cell, even inside code.
    return f"| {' | '.join(text.replace('|', chr(92) + '|') for text in texts)} |"


def rows(prefix: str, settings: object, *, with_groups: bool) -> Iterator[str]:
    """Yield the fields of a dataclass instance, those of groups inside it after its own."""
    fields = dataclasses.fields(settings)  # type: ignore[arg-type]
    values = {field.name: getattr(settings, field.name) for field in fields}
    for field in fields:
        if field.metadata:
            yield row(f"{prefix}{field.name}", field.metadata["setting"], values[field.name])
    for name, value in values.items():
        if with_groups and dataclasses.is_dataclass(value):
            yield from rows(f"{prefix}{name}.", value, with_groups=True)


def table(prefix: str, settings: object, *, with_groups: bool = True) -> list[str]:
    """Return the Markdown table of a dataclass instance."""
    return ["| setting | default | meaning |", "|---|---|---|", *rows(prefix, settings, with_groups=with_groups), ""]


def settings_page() -> str:
    config = Config()
    lines = [HEADER, "## Top level", "", *table("", config, with_groups=False)]
    for field in dataclasses.fields(config):
        group = getattr(config, field.name)
        if dataclasses.is_dataclass(group):
            lines += [f"## {field.name}", "", *table(f"{field.name}.", group)]
    lines += ["## Entries of data.sources and eval.sets", "", *table("<name>.", DataSetConfig())]
    return "\n".join(lines)


def algorithms_page() -> str:
    """Return docs/algorithms.md with its generated tables."""
    page = (ROOT / ALGORITHMS).read_text(encoding="utf-8")
    for name, lines in (("presets", presets()), ("losses", losses()), ("advantages", advantages())):
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, _, rest = page.partition(begin)
        _, marker, after = rest.partition(end)
        assert marker, f"docs/algorithms.md lacks the markers of the table {name}"
        page = before + begin + "\n".join(lines) + "\n" + end + after
    return page


def presets() -> list[str]:
    lines = [
        "| preset | advantage | loss | denominator | differs from the defaults | source |",
        "|---|---|---|---|---|---|",
    ]
    default = AlgorithmConfig()
    for file in sorted((ROOT / "configs" / "algorithm").glob("*.yaml")):
        text = file.read_text()
        values = yaml.safe_load(text)
        if values.get("trains_on") == "demonstrations":  # no advantage, no policy loss
            continue
        others = values.items() - {"name": file.stem}.items()
        extras = {name: v for name, v in others if name not in ("name", "advantage", "loss", "normalizer")}
        differences = [
            f"`{name}={typed(v)}`" for name, v in values.items() if name in extras and v != getattr(default, name)
        ]
        main = [values.get(name, getattr(default, name)) for name in ("advantage", "loss", "normalizer")]
        lines.append(
            cells(f"`{file.stem}`", *(f"`{value}`" for value in main), ", ".join(differences) or "–", source(text))
        )
    return lines


def source(text: str) -> str:
    """Return the first sentence of a preset's header, arXiv numbers as links."""
    header = " ".join(line.removeprefix("#").strip() for line in re.findall(r"^#.*", text, flags=re.M))
    sentence = re.split(r"(?<=[a-z)\d]{2})\. (?=[A-Z])|: ", header, maxsplit=1)[0].rstrip(".")
    return re.sub(r"arXiv:(\d+\.\d+)", r"[\1](https://arxiv.org/abs/\1)", sentence)


def losses() -> list[str]:
    lines = ["| `algorithm.loss` | one ratio per | settings | formula |", "|---|---|---|---|"]
    for name, loss in sorted(POLICY_LOSSES.items()):
        ratio = "rollout" if loss.sequence_log_ratio else "token" if loss.has_ratio else "–"
        if loss.sequence_log_ratio and loss.whole_step(AlgorithmConfig()) is None:
            ratio = "token or rollout"
        lines.append(cells(f"`{name}`", ratio, arguments(loss), first_line(loss)))
    return lines


def advantages() -> list[str]:
    lines = ["| `algorithm.advantage` | needs | settings | formula |", "|---|---|---|---|"]
    needs: Mapping[str, str] = {
        "compares_group": "a group",
        "needs_greedy": "a greedy answer per prompt",
        "needs_critic": "a critic",
        "needs_states": "turns of equal state",
    }
    for name, advantage in sorted(ADVANTAGES.items()):
        requirements = [text for attribute, text in needs.items() if getattr(advantage, attribute)]
        lines.append(cells(f"`{name}`", ", ".join(requirements) or "–", arguments(advantage), first_line(advantage)))
    return lines


def arguments(declared: Declared) -> str:
    return ", ".join(f"`{name}`" for name in declared.arguments) or "–"


def first_line(declared: Declared) -> str:
    return " ".join((declared.function.__doc__ or "").split("\n\n")[0].split()).rstrip(".")


PAGES = {"docs/settings.md": settings_page, ALGORITHMS: algorithms_page}

if __name__ == "__main__":
    sys.exit(main(PAGES, "Write docs/settings.md and the tables of docs/algorithms.md."))
