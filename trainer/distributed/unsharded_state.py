"""Whole parameters and moments of a checkpoint, independent of the ranks that wrote it.

    parameters.safetensors, optimizer.pt      one process, DDP
    state/*_optim_states.pt, one per rank     ZeRO-2 and ZeRO-3 of DeepSpeed 0.19

Tensors are mapped from disk and assembled one parameter at a time, so memory never holds a second model. DeepSpeed's
own converter (`ds_to_universal`) unpickles, supports only Adam, and writes the state to disk twice more.

Loading runs no code: safetensors, and `torch.load` with weights only. Not covered: forged weights.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from lockstep.rollout.errors import CheckpointError
from lockstep.trainer.distributed.sharding import OPTIMIZER, PARAMETERS

SWITCH = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
"""Environment variable of torch that overrides the argument `weights_only` of `torch.load`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeParameter:
    """One trained parameter as saved."""

    weight: torch.Tensor
    moments: Mapping[str, Any]
    """Optimizer state by the optimizer's own keys: tensors of the parameter's shape, and single numbers."""


Read = Callable[[str], WholeParameter]
"""Function from a parameter's name to its saved state."""


def is_per_weight(value: Any) -> bool:
    """True if a moment is a tensor over the weights. Adam's update count is a tensor without dimensions."""
    return isinstance(value, torch.Tensor) and value.ndim > 0


class Span(NamedTuple):
    """Range of a flat tensor."""

    start: int
    count: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.narrow(0, self.start, self.count)


class _Shard(NamedTuple):
    """State that one rank saved: flat tensors by parameter group."""

    weights: Sequence[torch.Tensor]
    moments: Mapping[int, Mapping[str, Any]]
    slices: Sequence[Mapping[str, Any]]
    """ZeRO-2: for each group, addresses in the flat tensors by name. A parameter outside this shard has none."""


class _Place(NamedTuple):
    """Location of a parameter in the shards."""

    group: int
    shape: torch.Size
    spans: Sequence[Span]
    """One per rank; concatenated they are the parameter."""


def open_state(directory: Path, *, trained: Sequence[str], zero_stage: int) -> Read:
    """Open a checkpoint of this ZeRO stage (0: none) for reading parameters, named in the optimizer's order.

    Raises `CheckpointError` for other parameters; whatever torch and safetensors raise for damaged files.
    """
    read, names = _of_shards(directory / "state", zero_stage) if zero_stage else _of_one(directory, trained)
    # Only the files of one process contain frozen parameters.
    refuse_other_model(directory, set(trained) ^ names if zero_stage else set(trained) - names)
    return read


def refuse_other_model(path: Path, differing: Set[str]) -> None:
    """Raise `CheckpointError` if names of parameters differ from the checkpoint's."""
    if differing:
        raise CheckpointError(f"{path} is of another model: {len(differing)} parameters differ, first {min(differing)}")


def _of_one(directory: Path, trained: Sequence[str]) -> tuple[Read, set[str]]:
    weights = safe_open(directory / PARAMETERS, framework="pt")
    optimizer_state = _load(directory / OPTIMIZER)
    if "state" not in optimizer_state:
        raise CheckpointError(f"{directory} holds the state of several optimizers, which ZeRO ranks cannot share")
    order = [index for group in optimizer_state["param_groups"] for index in group["params"]]
    if len(order) != len(trained):
        raise CheckpointError(
            f"{directory} is of another model: its optimizer has {len(order)} parameters, this one has {len(trained)}"
        )
    index_of = dict(zip(trained, order, strict=True))

    def read(name: str) -> WholeParameter:
        return WholeParameter(weight=weights.get_tensor(name), moments=optimizer_state["state"].get(index_of[name], {}))

    return read, set(weights.keys())


def _of_shards(directory: Path, zero_stage: int) -> tuple[Read, set[str]]:
    with weights_only_loading():
        shards = [_shard(_load(file)["optimizer_state_dict"], zero_stage) for file in _files(directory, "optim")]
        shapes = _load(_files(directory, "model")[0])["param_shapes"]
    places = {}
    for group, group_shapes in enumerate(shapes):
        spans = _by_slices(shards, group, group_shapes) if zero_stage < 3 else _by_division(len(shards), group_shapes)
        places |= {name: _Place(group, shape, spans[name]) for name, shape in group_shapes.items()}

    def read(name: str) -> WholeParameter:
        group, shape, spans = places[name]

        def whole(flats: Sequence[torch.Tensor]) -> torch.Tensor:
            parts = [span.of(flat) for span, flat in zip(spans, flats, strict=True) if span.count]
            return torch.cat(parts).view(shape)

        states = [shard.moments.get(group, {}) for shard in shards]
        return WholeParameter(
            weight=whole([shard.weights[group] for shard in shards]),
            moments={
                key: whole([state[key] for state in states]) if is_per_weight(value) else value
                for key, value in states[0].items()
            },
        )

    return read, set(places)


def _shard(saved: Mapping[str, Any], zero_stage: int) -> _Shard:
    if zero_stage == 3:
        return _Shard(saved["fp32_flat_groups"], saved["optimizer_state_dict"]["state"], ())
    state = saved["base_optimizer_state"]["state"]
    return _Shard(saved["single_partition_of_fp32_groups"], state, saved["param_slice_mappings"])


def _by_slices(shards: Sequence[_Shard], group: int, named: Mapping[str, torch.Size]) -> dict[str, list[Span]]:
    """Locate parameters under ZeRO-2, which slices a whole group over ranks and records the addresses."""
    spans: dict[str, list[Span]] = {}
    for name in named:
        addresses = [shard.slices[group].get(name) for shard in shards]
        spans[name] = [Span(0, 0) if at is None else Span(at.start, at.numel) for at in addresses]
    return spans


def _by_division(num_ranks: int, named: Mapping[str, torch.Size]) -> dict[str, list[Span]]:
    """Locate parameters under ZeRO-3, which splits each into equal parts over ranks, the last one padded."""
    spans: dict[str, list[Span]] = {}
    start = 0
    for name, shape in named.items():
        size = -(-shape.numel() // num_ranks)
        spans[name] = [Span(start, max(0, min(size, shape.numel() - rank * size))) for rank in range(num_ranks)]
        start += size
    return spans


def _files(directory: Path, kind: str) -> list[Path]:
    """Return DeepSpeed's files of a kind, ordered by rank."""
    by_rank = {
        int(match[1]) if (match := re.search(r"pp_rank_(\d+)_", file.name)) else 0: file
        for file in directory.glob(f"*{kind}_states.pt")
    }
    if not by_rank or sorted(by_rank) != list(range(len(by_rank))):
        there = ", ".join(map(str, sorted(by_rank))) or "none"
        raise CheckpointError(f"{directory} lacks {kind} states of DeepSpeed; found those of ranks: {there}")
    return [by_rank[rank] for rank in sorted(by_rank)]


def _load(file: Path) -> Any:
    return torch.load(file, map_location="cpu", mmap=True, weights_only=True)


@contextmanager
def weights_only_loading() -> Iterator[None]:
    """Force `torch.load` to be weights-only inside the block, whatever its caller passes.

    DeepSpeed 0.19.8 calls `torch.load(weights_only=False)`, which executes pickles. Torch's environment switch
    overrides it, and four classes of DeepSpeed's state are allowed by name; others raise pickle.UnpicklingError.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = "1"
    try:
        with torch.serialization.safe_globals([LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]):
            yield
    finally:
        if before is None:
            del os.environ[SWITCH]
        else:
            os.environ[SWITCH] = before
