"""Memory of the accelerator that this process caches and another one needs."""

from __future__ import annotations

import gc

import torch


def release_cached_memory() -> None:
    """Return the memory that torch keeps for later tensors to the device; on a CPU there is none to return.

    An engine on the trainer's GPU allocates physical memory of its own, which torch's cache would occupy.
    """
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
