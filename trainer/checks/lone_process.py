"""The only process of `accelerate launch`: whether it was asked for more."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

DDP = Path(__file__).resolve().parents[2] / "configs/accelerate/ddp.yaml"


def lone_process_problems() -> Iterator[str]:
    """Yield the problem of a process that `accelerate launch` started alone, although it was asked for several."""
    if (processes := _asked_processes(_command_of_parent())) > 1:
        yield (
            f"accelerate launch was asked for {processes} processes and started one, as it does on a machine without "
            f"GPUs if no launch file says otherwise; type accelerate launch --config_file {DDP} "
            f"--num_processes {processes} ..., or leave --num_processes out"
        )


def _command_of_parent() -> list[str]:
    try:
        return psutil.Process(os.getppid()).cmdline()
    except psutil.Error:
        return []


def _asked_processes(words: Sequence[str]) -> int:
    match = re.search(r"accelerate.* --num[_-]processes[= ](\d+) ", f"{' '.join(words)} ")
    return int(match[1]) if match else 1
