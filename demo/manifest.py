"""The manifest of a demo: the recipe that made it and the hashes of its files, to reuse or remake it.

Imports nothing heavy, so that a second call of the script answers in a fraction of a second.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.rollout.errors import ConfigError

DEFAULT_ARCHITECTURE = "qwen3"
ARCHITECTURE_NAMES = (DEFAULT_ARCHITECTURE, "qwen3_moe", "falcon_h1", "qwen3_next", "gpt_oss")
TASK_NAMES = ("calculator", "chain", "reverse", "squares")
MANIFEST = "lockstep_demo.json"

_ROOT = Path(__file__).resolve().parents[1]
# The code that determines the files. Its syntax trees are the recipe: a change of a number or a rule makes the demo
# again, a change of comments, docstrings or layout does not.
_RECIPE_SOURCES = (
    "demo/architectures.py",
    "demo/make.py",
    "demo/play.py",
    "demo/pretraining.py",
    "demo/tasks.py",
    "demo/tokenizer.py",
    "demo/vision.py",
    "demo/warm_start.py",
    "rollout/environments/demo/calculator.py",
    "rollout/environments/demo/chain.py",
    "rollout/environments/demo/squares.py",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoInfo:
    """Summary and place of a demo."""

    task: str
    model_dir: Path
    data_dir: Path
    sampled_reward: float
    """Mean reward at temperature 1 on training prompts, after the warm start."""
    greedy_heldout_reward: float
    num_parameters: int
    vocab_size: int
    is_cached: bool
    """True if it was made earlier and reused."""


def find_made(
    task: str, model_dir: Path, data_dir: Path, seed: int, architecture: str = DEFAULT_ARCHITECTURE
) -> DemoInfo | None:
    """Return the demo in these directories if its settings, its recipe and the hash of every file match, else None.

    Raises:
        ConfigError: `model_dir` holds files that no demo script wrote, so they must not be overwritten.
    """
    path = model_dir / MANIFEST
    if not path.is_file():
        if model_dir.is_dir() and any(model_dir.iterdir()):
            raise ConfigError(f"{model_dir} is not empty and is not a demo; choose another --out, or remove it")
        return None
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    roots = {"model": model_dir, "data": data_dir}
    files = [(roots[name.split("/")[0]] / name.split("/", 1)[1], digest) for name, digest in manifest["sha256"].items()]
    is_intact = all(file.is_file() and _sha256(file) == digest for file, digest in files)
    if manifest["recipe_hash"] != recipe_hash(task, seed, architecture) or not is_intact:
        return None
    return DemoInfo(**manifest["info"], model_dir=model_dir, data_dir=data_dir, is_cached=True)


def write_manifest(
    directory: Path,
    recipe: str,
    *,
    info: Mapping[str, Any],
    model: Iterable[Path],
    data_dir: Path,
    data: Iterable[str],
) -> None:
    """Write the manifest to `directory`. recipe: its hash. info: the fields of `DemoInfo` without the directories.

    data: names of files in `data_dir`.
    """
    manifest = {
        "recipe_hash": recipe,
        "info": dict(info),
        "sha256": {
            **{f"model/{path.name}": _sha256(path) for path in sorted(model)},
            **{f"data/{name}": _sha256(data_dir / name) for name in sorted(set(data))},
        },
    }
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def recipe_hash(task: str, seed: int, architecture: str = DEFAULT_ARCHITECTURE) -> str:
    """Hash everything that determines the files: task, seed, architecture, code and the version of torch."""
    parts = [task, str(seed), architecture, importlib.metadata.version("torch").split("+")[0]]
    parts += [_syntax((_ROOT / name).read_text(encoding="utf-8")) for name in _RECIPE_SOURCES]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _syntax(source: str) -> str:
    """Return the syntax tree of a module without docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [line for line in node.body if not _is_string(line)]
    return ast.dump(tree)


def _is_string(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
