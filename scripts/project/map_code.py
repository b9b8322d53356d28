"""Write docs/map.md: the rooms of the library in the order of their layers, and every module in one line.

    python -m scripts.project.map_code            # also: make docs
    python -m scripts.project.map_code --check    # write nothing; exit 1 if the page is out of date

The page is generated from docstrings. To change a line, edit the docstring of its module.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

from scripts.project.generated import ROOT, main

LIBRARY = ("lab", "integrations", "trainer", "rewards", "rollout")
"""The packages whose modules have layers."""
PACKAGES = (*LIBRARY, "demo", "scripts")
HEADER = """# Map of the code

Start with `rollout/records.py`, the records that pass between stages, and `Trainer.step` in `trainer/step.py`, one
training step. `make docs` writes this page from the docstrings of the modules.

## Rooms

A room is a folder or a module directly inside a package. It imports only rooms below it in this list.
`tests/unit/project/test_architecture.py` checks that, and that no modules import each other in a circle.
"""

ROOMS = (
    "lab/__init__.py",
    "lab/diagnose.py",
    "lab/objectives",
    "lab/run_replay",
    "lab/replay.py",
    "lab/inspect_run.py",
    "lab/plot.py",
    "lab/losses",
    "lab/environments",
    "lab/finding.py",
    "lab/watch",
    "lab/pages",
    "lab/dumps",
    "lab/locate",
    "lab/diagnosis",
    "lab/reward_model",
    "integrations/__init__.py",
    "integrations/serve_gateway.py",
    "integrations/serve_sandbox.py",
    "integrations/environments",
    "integrations/tool_servers",
    "integrations/sandbox",
    "integrations/hosts",
    "integrations/gateway",
    "trainer/__init__.py",
    "trainer/tools",
    "trainer/run",
    "trainer/sft",
    "trainer/step.py",
    "trainer/evaluate",
    "trainer/observe",
    "trainer/engines",
    "trainer/cli.py",
    "trainer/resumption.py",
    "trainer/settings_file.py",
    "trainer/words.py",
    "trainer/compose.py",
    "trainer/checks",
    "trainer/build.py",
    "trainer/update",
    "trainer/collect",
    "trainer/score",
    "trainer/credit",
    "trainer/model",
    "trainer/batch",
    "trainer/data",
    "trainer/checkpoint",
    "trainer/distributed",
    "trainer/config",
    "trainer/objective",
    "trainer/command_line.py",
    "trainer/stopwatch.py",
    "trainer/setting.py",
    "rewards/__init__.py",
    "rewards/composition.py",
    "rewards/workers",
    "rewards/resolve.py",
    "rewards/model",
    "rewards/functions",
    "rewards/signatures.py",
    "rewards/trl.py",
    "rewards/batches.py",
    "rewards/shaping.py",
    "rewards/length.py",
    "rewards/meter.py",
    "rewards/outcomes.py",
    "rollout/__init__.py",
    "rollout/sampler",
    "rollout/environments",
    "rollout/saved_rollouts.py",
    "rollout/rollout_lines.py",
    "rollout/episode",
    "rollout/hosts",
    "rollout/sandbox",
    "rollout/server",
    "rollout/weights",
    "rollout/engine",
    "rollout/models",
    "rollout/chat",
    "rollout/media",
    "rollout/system",
    "rollout/on_demand.py",
    "rollout/records.py",
    "rollout/replies.py",
    "rollout/vllm_names.py",
    "rollout/errors.py",
    "rollout/safe_text.py",
)
"""The rooms of the library, highest first. The only place that declares their order."""


def modules(package: str) -> list[Path]:
    """Return the modules of a package, its own before those of its folders; empty `__init__` files are left out."""
    paths = sorted((ROOT / package).rglob("*.py"), key=lambda path: (len(path.relative_to(ROOT).parts) > 2, path))
    return [path.relative_to(ROOT) for path in paths if path.read_text(encoding="utf-8").strip()]


def sentence(module: Path) -> str:
    """Return the first sentence of a module's docstring in one line."""
    text = ast.get_docstring(ast.parse((ROOT / module).read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[.:?])\s(?=[A-Z`])", paragraph)[0].rstrip(".:")


def room_list() -> list[str]:
    """Return one Markdown list item per package and, indented, one per room."""
    lines: list[str] = []
    for room in ROOMS:
        package, name = room.split("/")
        if f"* `{package}/`" not in lines:
            lines.append(f"* `{package}/`")
        source = Path(room) if name.endswith(".py") else Path(room, "__init__.py")
        lines.append(f"    * `{name}{'' if name.endswith('.py') else '/'}`: {sentence(source)}")
    return lines


def page() -> str:
    lines = [HEADER, *room_list(), ""]
    for package in PACKAGES:
        lines += [f"## {package}", "", "| module | contents |", "|---|---|"]
        lines += [f"| `{module}` | {sentence(module).replace('|', chr(92) + '|')} |" for module in modules(package)]
        lines.append("")
    return "\n".join(lines)


PAGES = {"docs/map.md": page}

if __name__ == "__main__":
    sys.exit(main(PAGES, "Write docs/map.md from the docstrings of all modules."))
