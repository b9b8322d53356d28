"""Where a benchmark computes: on the GPU if there is one, with its clock, in the dtype of mixed precision."""

from __future__ import annotations

import time

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def autocast(dtype: str) -> torch.autocast:
    """What mixed precision computes in, as Accelerate sets it for the trainer."""
    return torch.autocast(DEVICE, torch.bfloat16, enabled=dtype == "bfloat16")


def clock() -> float:
    """Seconds: CPU time of the process, or on a GPU the time at which all queued work is done."""
    if DEVICE == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()
