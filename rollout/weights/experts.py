"""Experts by the names of the checkpoint. transformers keeps all experts of a layer in one tensor; checkpoints, and
with them vLLM's loaders, have tensors per expert.

    mlp.experts.gate_up_proj (E, 2I, D)  ->  mlp.experts.<e>.gate_proj.weight, mlp.experts.<e>.up_proj.weight (I, D)
    mlp.experts.down_proj    (E, D, I)   ->  mlp.experts.<e>.down_proj.weight (D, I)

Covered: qwen2_moe and qwen3_moe; gpt_oss, whose checkpoints are stacked too. Others are refused by name: weights that
reach the wrong place are worse than none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from rollout.errors import SyncError

PER_EXPERT = ("qwen2_moe", "qwen3_moe")
"""Model types whose checkpoints have tensors per expert, by the names above."""
STACKED = ("gpt_oss",)
"""Model types whose checkpoints are as transformers keeps them."""
_NAME = re.compile(r"(?P<layer>.+\.mlp\.experts)\.(?P<kind>gate_up_proj|down_proj)")


def is_stacked(name: str, shape: tuple[int, ...]) -> bool:
    """Whether this is a tensor of several experts."""
    return len(shape) == 3 and ".experts." in name


def parts(name: str, shape: tuple[int, ...], model_type: str) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Name, shape and first element of each tensor that a stacked one is sent as: each is a run of its elements.

    Raises:
        SyncError: the model type is not covered.
    """
    if model_type in STACKED:
        yield name, shape, 0
        return
    match = _NAME.fullmatch(name)
    if model_type not in PER_EXPERT or match is None:
        raise SyncError(
            f"weight sync does not know how the engine names the experts in {name} of a {model_type} model; known are "
            f"{', '.join((*PER_EXPERT, *STACKED))}: set model.path to one of these, or to a model without experts"
        )
    layer = match["layer"]
    for expert in range(shape[0]):
        first = expert * shape[1] * shape[2]
        if match["kind"] == "down_proj":
            yield f"{layer}.{expert}.down_proj.weight", shape[1:], first
            continue
        half = (shape[1] // 2, shape[2])
        yield f"{layer}.{expert}.gate_proj.weight", half, first
        yield f"{layer}.{expert}.up_proj.weight", half, first + half[0] * half[1]
