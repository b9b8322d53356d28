"""Restore the trained module and optimizer from a checkpoint that other ranks wrote.

Covered: one process from ZeRO's shards, ZeRO ranks from one process or from another number of ranks. Parameters and
moments are bit-identical to the saved ones. Ranks that saved the checkpoint themselves read their shards through
DeepSpeed (`Distributed.load_state`). Not covered: optimizers whose state is not one number per weight (8-bit, Muon),
and states that DeepSpeed offloads to disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from lockstep.rollout.errors import CheckpointError
from lockstep.trainer.distributed.unsharded_state import Read, Span, WholeParameter, is_per_weight


class _Piece(NamedTuple):
    """Part of a parameter that this rank holds."""

    name: str
    shape: torch.Size
    inside: Span
    """Range of the flattened parameter."""
    flat: Span
    """The same range in the flat tensors of the parameter's group."""


def fill_whole(module: nn.Module, optimizer: torch.optim.Optimizer, trained: Sequence[str], read: Read) -> None:
    """Restore a module that this process holds whole. trained: names in the optimizer's order."""
    own = dict(module.named_parameters())
    state = {}
    for index, name in enumerate(trained):
        parameter = _checked(read(name), name, own[name].shape)
        with torch.no_grad():
            own[name].copy_(parameter.weight)
        state[index] = {key: _copied(value) for key, value in parameter.moments.items()}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def fill_shards(engine: Any, zero_stage: int, read: Read) -> None:
    """Restore the shards of a DeepSpeed engine under ZeRO-2 or ZeRO-3, before its first step; a collective."""
    zero_optimizer: Any = engine.optimizer
    is_stage_3 = zero_stage == 3
    if is_stage_3:
        zero_optimizer.checkpoint_event_prologue()
    flats = (
        zero_optimizer.fp32_partitioned_groups_flat if is_stage_3 else zero_optimizer.single_partition_of_fp32_groups
    )
    groups = zero_optimizer.fp16_groups if is_stage_3 else zero_optimizer.bit16_groups
    for flat, group in zip(flats, groups, strict=True):
        state: dict[str, Any] = {}
        for piece in _divided(engine, group) if is_stage_3 else _sliced(engine, group):
            parameter = _checked(read(piece.name), piece.name, piece.shape)
            piece.flat.of(flat.data).copy_(piece.inside.of(parameter.weight.flatten()))
            for key, value in parameter.moments.items():
                if is_per_weight(value):
                    buffer = state.setdefault(key, torch.zeros_like(flat.data))
                    piece.flat.of(buffer).copy_(piece.inside.of(value.flatten()))
                else:
                    state[key] = _copied(value)
        zero_optimizer.optimizer.state[flat] = state
    # DeepSpeed's own loader, given the state it would have saved here, derives the weights that compute from it.
    zero_optimizer.load_state_dict([zero_optimizer.state_dict()] * engine.world_size, load_from_fp32_weights=True)
    if is_stage_3:
        zero_optimizer.checkpoint_event_epilogue()
    else:
        zero_optimizer.update_lp_params()


def _divided(engine: Any, group: Sequence[Any]) -> Iterator[_Piece]:
    """Yield this rank's pieces under ZeRO-3: an equal part of each parameter, the last rank's padded."""
    start = 0
    for parameter in group:
        size = parameter.partition_numel()
        begin = min(engine.global_rank * size, parameter.ds_numel)
        count = min(size, parameter.ds_numel - begin)
        yield _Piece(engine.param_names[parameter], parameter.ds_shape, Span(begin, count), Span(start, count))
        start += size


def _sliced(engine: Any, group: Sequence[Any]) -> Iterator[_Piece]:
    """Yield this rank's pieces under ZeRO-2. Parameters outside its slice yield an empty piece."""
    for parameter in group:
        mapping = parameter._hp_mapping
        inside = flat = Span(0, 0)
        if mapping is not None:
            inside = Span(mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel)
            flat = Span(mapping.hp_fragment_address.start, mapping.hp_fragment_address.numel)
        yield _Piece(engine.param_names[parameter], parameter.shape, inside, flat)


def _copied(value: Any) -> Any:
    """Clone tensors: parameters of one shard share its update count, but here each needs its own."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _checked(found: WholeParameter, name: str, shape: torch.Size) -> WholeParameter:
    """Raise `CheckpointError` for another shape, and for moments that are not one number per weight."""
    if found.weight.shape != shape:
        raise CheckpointError(f"{name} has shape {tuple(found.weight.shape)} in the checkpoint, not {tuple(shape)}")
    for key, value in found.moments.items():
        if is_per_weight(value) and value.shape != shape:
            raise CheckpointError(
                f"the optimizer's {key} of {name} is not one number per weight, so it cannot be split for other ranks; "
                "resume on the ranks that saved it, or start from the run's exported model (model.path=)"
            )
    return found
