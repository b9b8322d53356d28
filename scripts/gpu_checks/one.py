"""Process of one check: runs it and writes its measurements.

    python -m lockstep.scripts.gpu_checks.one MODULE NAME DIRECTORY [--rehearse]

`measured.json` in the directory has the measurements, or the error that ended the check; `memory.txt` torch's summary
of the GPU's memory afterwards.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.scripts.gpu_checks.measured import Measured
    from lockstep.scripts.gpu_checks.subject import Subject

RESULT = "measured.json"


def main(module: str, name: str, directory: str, *flags: str) -> int:
    import torch

    from lockstep.scripts.gpu_checks.subject import Subject

    folder = Path(directory)
    subject = Subject(directory=folder, rehearses="--rehearse" in flags)
    try:
        check: Callable[[Subject], Sequence[Measured]] = getattr(importlib.import_module(module), name)
        report = {"measured": [asdict(item) for item in check(subject)]}
    except Exception as error:  # a check may fail in any way, and the others still run
        traceback.print_exc()
        report = {"error": f"{type(error).__name__}: {error}"}
    (folder / RESULT).write_text(json.dumps(report), encoding="utf-8")
    if not subject.rehearses:
        (folder / "memory.txt").write_text(torch.cuda.memory_summary(), encoding="utf-8")
    return 0


if __name__ == "__main__":  # an engine's process imports this file, too
    sys.exit(main(*sys.argv[1:]))
