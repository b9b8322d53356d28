"""Memory of the device: what this process caches and another one needs, and errors that say that none is left."""

from __future__ import annotations

import gc

import torch

CPU_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory"
"""Text of PyTorch's RuntimeError when the CPU's memory is used up; GPUs raise `torch.OutOfMemoryError`."""


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or CPU_ALLOCATOR in str(error)


def release_cached_memory() -> None:
    """Return the memory that torch keeps for later tensors to the device; on a CPU there is none to return.

    An engine on the trainer's GPU allocates physical memory of its own, which torch's cache would occupy.
    """
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
