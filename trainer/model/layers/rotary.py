"""Rotary positions whose frequencies depend on the length of a row: `longrope` and `dynamic`.

transformers chooses them by the largest position of its input, so one row beyond the original length would change all
rows of its pack. Here each row has the frequencies of its own length, computed by transformers' own code.

An engine cannot do that: a row that grows beyond the original length would change its cached keys. vLLM uses the long
factors of `longrope` for every row if its context is longer than the original length, and so does the trainer of such
an engine (`DecoderSetup.engine_context`). `dynamic` frequencies are refused there (trainer/engines/named_models.py).
"""

from __future__ import annotations

from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

LONGROPE, DYNAMIC = "longrope", "dynamic"


def original_lengths(config: PreTrainedConfig) -> dict[str, int]:
    """Return the longest row with the original frequencies [tokens], by the kind of rotary positions that have one."""
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None) or {}
    lengths: dict[str, int] = {}
    for one in (parameters, *parameters.values()):
        if isinstance(one, dict) and (kind := one.get("rope_type")) in (LONGROPE, DYNAMIC):
            lengths[kind] = (
                one["original_max_position_embeddings"] if kind == LONGROPE else text.max_position_embeddings
            )
    return lengths


def isolate_rows(model: nn.Module, engine_context: int | None) -> None:
    """Let the rotary positions of a model choose their frequencies row by row, in place; idempotent.

    engine_context: as in `DecoderSetup`.
    """
    for module in _rotaries(model):
        module.engine_context = engine_context
        module.forward = partial(_forward, module)


def longest_shared(model: nn.Module) -> float:
    """Return the longest row [tokens] up to which rows can share the computation of a prefix."""
    return min((_original(module) for module in _rotaries(model) if not _is_always_long(module)), default=float("inf"))


def _rotaries(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if {LONGROPE, DYNAMIC} & _kinds(module)]


def _kinds(module: nn.Module) -> set[Any]:
    kinds = vars(module).get("rope_type")
    return set(kinds.values()) if isinstance(kinds, dict) else {kinds}


def _original(module: Any) -> int:
    return min(original_lengths(module.config).values())


def _is_always_long(module: Any) -> bool:
    return LONGROPE in _kinds(module) and (module.engine_context or 0) > _original(module)


def _forward(module: Any, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, ...]:
    """Compute cosines and sines as the module's class does for each row alone."""
    original = _original(module)
    lengths = _row_lengths(position_ids)
    if _is_always_long(module):
        lengths = lengths.clamp(min=original + 1)
    if LONGROPE in _kinds(module):  # all long rows have the same factors
        lengths = torch.where(lengths > original, lengths.max(), original)
    else:
        lengths = lengths.clamp(min=original)
    arguments = {} if layer_type is None else {"layer_type": layer_type}
    outputs: tuple[Tensor, ...] = ()
    for length in lengths.unique().tolist():
        fresh = copy(module)  # the class keeps the frequencies of its last input
        fresh._buffers = dict(module._buffers)
        last = torch.full_like(position_ids[..., :1], length - 1)
        places = torch.cat([position_ids.clamp(max=length - 1), last], -1)
        own = tuple(part[..., :-1, :] for part in type(module).forward(fresh, x, places, **arguments))
        is_own = (lengths == length)[..., None]
        outputs = tuple(torch.where(is_own, new, old) for new, old in zip(own, outputs or own, strict=True))
    return outputs


def _row_lengths(position_ids: Tensor) -> Tensor:
    """Return the length of each position's row, in the shape of (..., L) positions, which start from 0 in each row."""
    rows = (position_ids == 0).cumsum(-1)
    longest = torch.zeros_like(position_ids[..., :1]).expand(*rows.shape[:-1], rows.shape[-1] + 1)
    return longest.scatter_reduce(-1, rows, position_ids + 1, "amax").gather(-1, rows)
