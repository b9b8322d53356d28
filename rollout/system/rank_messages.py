"""Bytes of any length between ranks: short ones in one collective, longer ones in two.

`all_gather_object` and `broadcast_object_list` of torch exchange the lengths first, which doubles the time of the many
short messages of a step: the outcomes of its phases.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

FIRST_BYTES = 512
"""Length of a payload [bytes] up to which it travels with its length."""
LENGTH_BYTES = 8


def gathered(payload: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """Return every rank's payload on every rank of the group, in rank order; a collective."""
    firsts = [torch.empty(LENGTH_BYTES + FIRST_BYTES, dtype=torch.uint8) for _ in range(dist.get_world_size(group))]
    dist.all_gather(firsts, _first(payload), group=group)
    lengths = [_length(first) for first in firsts]
    if (longest := max(lengths)) <= FIRST_BYTES:
        return [_content(first[LENGTH_BYTES:], length) for first, length in zip(firsts, lengths, strict=True)]
    wholes = [torch.empty(longest, dtype=torch.uint8) for _ in lengths]
    dist.all_gather(wholes, _padded(payload, longest), group=group)
    return [_content(whole, length) for whole, length in zip(wholes, lengths, strict=True)]


def broadcast_from_first(payload: bytes, group: dist.ProcessGroup) -> bytes:
    """Return the payload of rank 0 on every rank of the group, which holds all ranks; a collective."""
    is_first = dist.get_rank(group) == 0
    first = _first(payload)
    dist.broadcast(first, src=0, group=group)
    if (length := _length(first)) <= FIRST_BYTES:
        return _content(first[LENGTH_BYTES:], length)
    whole = _padded(payload if is_first else b"", length)
    dist.broadcast(whole, src=0, group=group)
    return _content(whole, length)


def _first(payload: bytes) -> torch.Tensor:
    return _padded(len(payload).to_bytes(LENGTH_BYTES, "little") + payload[:FIRST_BYTES], LENGTH_BYTES + FIRST_BYTES)


def _length(first: torch.Tensor) -> int:
    return int.from_bytes(_content(first, LENGTH_BYTES), "little")


def _content(padded: torch.Tensor, length: int) -> bytes:
    return padded[:length].numpy().tobytes()


def _padded(content: bytes, size: int) -> torch.Tensor:
    padded = torch.zeros(size, dtype=torch.uint8)
    if content:
        padded[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return padded
