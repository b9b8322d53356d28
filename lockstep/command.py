"""The command `lockstep`: each script of scripts/ by its name, from any directory.

lockstep                     list the commands
lockstep train ...           as python scripts/train.py ...
lockstep --version           its version and addresses
lockstep --configs           the folder of the presets and of the launch files
"""

from __future__ import annotations

import ast
import difflib
import os
import runpy
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent / "scripts"


def commands() -> dict[str, str]:
    """Return the first line of each command's description by its name. Imports none of them."""
    descriptions = {}
    for path in sorted(SCRIPTS.glob("*.py")):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        descriptions[path.stem.replace("_", "-")] = text.partition("\n")[0]
    return descriptions


def main() -> None:
    """Run the command that the first word names, with the words after it; exit status 2 if there is none."""
    name, words = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("--help", [])
    if name in ("--version", "-V"):
        from importlib.metadata import metadata

        about = metadata("lockstep-rl")
        print("\n".join([f"lockstep {about['Version']}", *about.get_all("Project-URL", [])]))
        return
    if name == "--configs":
        from lockstep.trainer.compose import CONFIG_DIR

        print(CONFIG_DIR)
        return
    descriptions = commands()
    if name in ("--help", "-h", "help"):
        print("usage: lockstep <command> [words]; lockstep <command> --help describes one\n")
        print("\n".join(f"  {command:<22} {description}" for command, description in descriptions.items()))
        return
    matches = (
        [name] if name in descriptions else [command for command in descriptions if command.startswith(f"{name}-")]
    )
    if len(matches) != 1:
        near = matches or difflib.get_close_matches(name, descriptions, n=1) or descriptions
        sys.exit(_refusal(f"{name} is not a command; expected {' or '.join(near) if matches else ', '.join(near)}"))
    module = matches[0].replace("-", "_")
    sys.argv = [f"lockstep {matches[0]}", *words]  # the program that usages name
    try:
        try:
            runpy.run_module(f"lockstep.scripts.{module}", run_name="__main__")
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # `lockstep inspect | head` has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its end
        sys.exit(1)


def _refusal(sentence: str) -> int:
    print(f"lockstep: {sentence}", file=sys.stderr)
    return 2
