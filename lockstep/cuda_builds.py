"""Let torchvision and torchaudio for CUDA lie beside torch for the CPU.

vLLM requires both, and package indexes have them for CUDA only. Their compiled parts do not load beside torch for the
CPU, and then importing transformers fails. `install` changes that for the moment of the import:

* torchvision: its Python, which image processors are written in, describes two operators that nothing has defined. They
  are defined, without an implementation.
* torchaudio: it is hidden, as if it was not installed. Nothing here needs sound.

Builds whose parts load stay as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

OPERATORS = ("nms", "qnms")
"""Operators that torchvision 0.28 describes without asking whether they are there."""
SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_definitions: list[object] = []  # torch forgets them with the object


class Preparations(MetaPathFinder):
    """Finds no module itself: acts when torchvision is looked for, or transformers, which imports both."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision":
            spec = PathFinder.find_spec(fullname, path)
            if spec is not None and spec.origin is not None and not _operators_load(Path(spec.origin).parent):
                _define_operators()
        if fullname == "transformers" and "torchaudio" not in sys.modules and not _torchaudio_loads():
            sys.modules["torchaudio"] = None  # pyright: ignore[reportArgumentType]: how Python marks a module as absent
        return None


def install() -> None:
    """Prepare the next imports in this process; without effect where that is done."""
    if not any(isinstance(finder, Preparations) for finder in sys.meta_path):
        sys.meta_path.insert(0, Preparations())


def _operators_load(folder: Path) -> bool:
    import torch

    for library in folder.glob("_C*.so"):
        try:
            torch.ops.load_library(library)
        except OSError:  # what it is linked with is not here
            return False
    return True


def _define_operators() -> None:
    import torch

    if not _definitions:
        definitions = torch.library.Library("torchvision", "DEF")
        for name in OPERATORS:
            definitions.define(name + SIGNATURE)
        _definitions.append(definitions)


def _torchaudio_loads() -> bool:
    """Return False for torchaudio without the mark of the CPU beside torch that has it."""
    from importlib.metadata import PackageNotFoundError, version  # 25 ms, which not every command needs

    try:
        versions = [version(name) for name in ("torch", "torchaudio")]
    except PackageNotFoundError:
        return True
    on_cpu, is_same = ("+cpu" in version for version in versions)
    return is_same or not on_cpu
