"""Models and data that scripts of this repository prepare, and the commands that make them."""

from __future__ import annotations

from pathlib import Path

DATA = {"data/demo": "make_demo_model.py", "data/real": "make_real_model.py"}
"""Scripts by the folder of their data, which has one folder per task."""
MODELS = {
    **{task: f"make_demo_model.py --task {task}" for task in ("calculator", "chain", "reverse")},
    "smollm2-135m-instruct": "make_real_model.py",
}
"""Commands by the name of a model's directory."""


def model_command(path: str) -> str | None:
    """Return the command that makes the model of a path, or None."""
    command = MODELS.get(Path(path).name)
    return command and f"python scripts/{command}"


def data_command(path: str) -> str | None:
    """Return the command that makes a data file `<folder>/<task>/<file>`, or None."""
    script = DATA.get(Path(path).parent.parent.as_posix())
    if script is None:
        return None
    script = "make_demonstrations.py" if Path(path).name.startswith("demonstrations") else script
    return f"python scripts/{script} --task {Path(path).parent.name}"


def data_folder(path: str) -> str | None:
    """Return the folder of prepared data that a path is in, or None."""
    return next((folder for folder in DATA if path.startswith(f"{folder}/")), None)
