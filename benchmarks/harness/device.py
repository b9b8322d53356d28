"""Device of a benchmark (the GPU if present), its clock, and mixed precision on it."""

from __future__ import annotations

import time

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def autocast(dtype: str) -> torch.autocast:
    """Return the autocast context that Accelerate enters for the trainer."""
    return torch.autocast(DEVICE, torch.bfloat16, enabled=dtype == "bfloat16")


def clock() -> float:
    """Return seconds: CPU time of the process, or on a GPU the time after all queued work."""
    if DEVICE == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()
