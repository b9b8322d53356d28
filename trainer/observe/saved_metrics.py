"""The numbers that a run has left in its metrics.jsonl, read back by every tool that looks at it.

A run that is killed, or that is writing right now, may leave half of the last line: the lines before it are read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rollout.errors import ConfigError, DataError


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """One object per step: `step` is the update, other names are metrics; what was not finite is None.

    Raises `ConfigError` without such a file, `DataError` with the line number if a line before the last one is damaged.
    """
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; name a run directory, for example runs/latest")
    texts = path.read_text(encoding="utf-8", errors="replace").splitlines()
    lines = []
    for number, text in enumerate(texts, start=1):
        try:
            line = json.loads(text)
            line["step"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if number == len(texts):
                break
            raise DataError(
                f"{path}:{number} is not a line of metrics: {error}; delete that line to see the others"
            ) from error
        lines.append(line)
    return lines
