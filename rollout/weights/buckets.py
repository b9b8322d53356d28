"""How a model's parameters are cut into buckets, and how tensors lie in a bucket's bytes.

Both ends of a weight transfer, and the gathering that feeds it, use these same functions.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, layerwise_groups

DEFAULT_BUCKET_BYTES = 512 * 2**20
ALIGNMENT = 16  # a tensor's offset in its bucket; a view of another dtype must start at a multiple of its item size


def nbytes(meta: ParamMeta) -> int:
    return math.prod(meta.shape) * meta.dtype.itemsize


def plan_buckets(metas: Sequence[ParamMeta], bucket_bytes: int) -> list[list[ParamMeta]]:
    """Cut parameters into buckets of at most `bucket_bytes`, never across a layer group.

    One bucket per decoder layer in the common case, so that a small model is not one single bucket. A tensor
    that is larger than `bucket_bytes` is a bucket of its own.
    """
    by_name = {meta.name: meta for meta in metas}
    buckets: list[list[ParamMeta]] = []
    for group in layerwise_groups([meta.name for meta in metas]):
        size = bucket_bytes + 1  # a new group starts a new bucket
        for name in group:
            meta = by_name[name]
            if size + nbytes(meta) > bucket_bytes:
                buckets.append([])
                size = 0
            buckets[-1].append(meta)
            size += nbytes(meta)
    return buckets


def bucket_layout(metas: Sequence[ParamMeta]) -> tuple[list[int], int]:
    """Aligned offset of each tensor in its bucket, and the size of the bucket, in bytes."""
    offsets, end = [], 0
    for meta in metas:
        offsets.append(end)
        end += -(-nbytes(meta) // ALIGNMENT) * ALIGNMENT
    return offsets, end


def views(bucket: torch.Tensor, metas: Sequence[ParamMeta]) -> list[tuple[str, torch.Tensor]]:
    """The named tensors of a received bucket, without a copy."""
    offsets, _ = bucket_layout(metas)
    return [
        (meta.name, bucket[offset : offset + nbytes(meta)].view(meta.dtype).view(meta.shape))
        for meta, offset in zip(metas, offsets, strict=True)
    ]


def new_bucket(size: int) -> torch.Tensor:
    """Bytes of main memory, in huge pages where the system has them: getting new memory page by page takes longer than
    copying something into it.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
