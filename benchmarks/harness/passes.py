"""Passes over a tile of logits: bytes that operations or interpreted kernels read and write, as multiples of the tile.

An operation in place reads and writes its tensor, one with `out=` only writes it. Matrix products are not counted, nor
operations that touch a few entries of a row (gather, scatter). A kernel's own loads and stores are counted in Triton's
interpreter; a dispatch mode sees nothing inside of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

VIEWS = ("view", "_unsafe_view", "slice", "detach", "t", "transpose", "expand", "alias", "unsqueeze", "select", "empty")
SPARSE = ("gather", "scatter_add_", "scatter_reduce_")
PRODUCTS = ("mm", "addmm", "addmm_")


class Passes:
    """Bytes by kind, in units of a number of bytes."""

    def __init__(self, unit: int) -> None:
        self.unit = unit
        self.bytes: Counter[str] = Counter()

    def pop(self) -> dict[str, float]:
        """Return the passes by kind since the last call."""
        passes = {kind: size / self.unit for kind, size in self.bytes.items()}
        self.bytes.clear()
        return passes


@contextmanager
def counted_operations(unit: int, *, tile: int, besides: Sequence[str] = ()) -> Iterator[Passes]:
    """Count torch's operations on tensors of at least `tile` elements inside the block, by their names.

    besides: names of further operations to leave out.
    """
    passes = Passes(unit)

    def size(one: Any) -> int:
        return one.nbytes if isinstance(one, torch.Tensor) and one.numel() >= tile else 0

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            name = func.__name__.partition(".")[0]
            if name not in (*VIEWS, *SPARSE, *PRODUCTS, *besides):
                read = args[1:] if name in ("copy_", "fill_", "zero_") else args
                passes.bytes[name] += sum(map(size, read)) + size(out)
            return out

    with Mode():
        yield passes


@contextmanager
def counted_kernels(unit: int, *, block: int) -> Iterator[Passes]:
    """Count what interpreted kernels load and store inside the block.

    block: elements from which on a load or store belongs to a tile; others are counted as "beside" it.
    """
    from triton.runtime.interpreter import interpreter_builder

    passes = Passes(unit)
    load, store = interpreter_builder.create_masked_load, interpreter_builder.create_masked_store

    def add(kind: str, pointers: Any, mask: Any) -> None:
        kind = kind if pointers.data.size >= block else f"{kind} beside"
        passes.bytes[kind] += int(mask.data.sum()) * pointers.dtype.element_ty.primitive_bitwidth // 8

    def counted_load(pointers: Any, mask: Any, *rest: Any) -> Any:
        add("load", pointers, mask)
        return load(pointers, mask, *rest)

    def counted_store(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        add("store", pointers, mask)
        return store(pointers, value, mask, *rest)

    with (
        mock.patch.object(interpreter_builder, "create_masked_load", counted_load),
        mock.patch.object(interpreter_builder, "create_masked_store", counted_store),
    ):
        yield passes
