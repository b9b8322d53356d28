"""Models and data that scripts of this repository prepare, and the commands that make them."""

from __future__ import annotations

import os.path
from pathlib import Path

from lockstep.rollout.environments import own_class
from lockstep.rollout.environments.declaration import declaration_of

DATA = {"data/demo": "make-demo-model", "data/real": "make-real-model"}
"""Commands by the folder of their data, which has one folder per task."""
DEMO = "data/demo"
"""Folder of the data that environments of the demo, and this reward, are for."""
DEMO_REWARD = "demo_answer"
FILES = ("train.jsonl", "heldout.jsonl")
"""Files that each of these commands writes for a task."""
DEMONSTRATIONS = ("demonstrations.jsonl", "demonstrations_heldout.jsonl")
"""Files that `lockstep make-demonstrations` adds for a task of the demo."""
REAL_MODEL = "smollm2-135m-instruct"
"""Directory of the model of `lockstep make-real-model`."""


def model_command(path: str) -> str | None:
    """Return the command that makes the model of a path, which is named after its task, or None."""
    name = Path(path).name
    if name == REAL_MODEL:
        return "lockstep make-real-model"
    is_task = declaration_of(own_class(name)).demo_task == name
    return f"lockstep make-demo-model --task {name}" if is_task else None


def data_command(path: str) -> str | None:
    """Return the command that makes a data file `<folder>/<task>/<file>`, or None."""
    file = Path(path)
    folder = file.parent.parent.as_posix()
    command = DATA.get(folder) if file.name in FILES else None
    if file.name in DEMONSTRATIONS and folder == "data/demo":
        command = "make-demonstrations"
    return command and f"lockstep {command} --task {file.parent.name}"


def data_folder(path: str) -> str | None:
    """Return the folder of prepared data that a path is in, or None."""
    place = f"/{os.path.normpath(path)}"
    return next((folder for folder in DATA if f"/{folder}/" in place), None)
