"""Exponential moving average of the trained parameters, of which each rank keeps the elements that it holds itself.

    average ← decay · average + (1 − decay) · parameters        float32, at each `advance`

Under ZeRO-3 these are the rank's shards, otherwise whole parameters; the values do not depend on the number of ranks.
For the weight sync and a forward pass `installed` writes the average into the trained module, so that no second model
is built, and writes the parameters back bit for bit.

Covered: one process, DDP, ZeRO-1 to 3, LoRA (the average of the adapter's matrices, not of their product), resuming on
other ranks. Not covered: buffers, which keep the values of the policy; shards on NVMe.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from lockstep.rollout.errors import CheckpointError
from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.distributed.unsharded_state import Span, refuse_other_model

DIRECTORY = "weight_average"
"""Directory of the average in a checkpoint: a file of each rank that holds its own elements."""


class WeightAverage:
    """The average, which begins at the parameters."""

    def __init__(self, distributed: Distributed, *, decay: float) -> None:
        """decay: share of the average that an `advance` keeps."""
        self._distributed = distributed
        self._decay = decay
        self._parameters = {
            name: parameter for name, parameter in distributed.unwrapped.named_parameters() if parameter.requires_grad
        }
        self._values: dict[str, Tensor]
        self.restart()

    @torch.no_grad()
    def restart(self) -> None:
        """Begin again at the parameters."""
        self._values = {name: own.to(torch.float32, copy=True) for name, own in self._local_elements().items()}

    @torch.no_grad()
    def advance(self) -> None:
        """Move the average towards the parameters."""
        for name, own in self._local_elements().items():
            self._values[name].lerp_(own.float(), 1 - self._decay)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Give the module the average for the duration of the block, which must not train; a collective."""
        parameters = {name: own.clone() for name, own in self._local_elements().items()}
        self._write(self._values)
        self._gather_persistent()
        try:
            yield
        finally:
            self._write(parameters)
        self._gather_persistent()  # not after an error, in which other ranks may be lost

    def save(self, directory: Path) -> None:
        """Write this rank's elements into `directory / DIRECTORY`; each rank calls it."""
        if self._distributed.zero_stage == 3 or self._distributed.is_main:
            (directory / DIRECTORY).mkdir(exist_ok=True)
            flat = {name: value.flatten().cpu() for name, value in self._values.items()}
            save_file(flat, directory / DIRECTORY / f"rank-{self._distributed.rank}.safetensors")

    def load(self, directory: Path) -> bool:
        """Read what `save` wrote, on whatever ranks. Returns False if there is none, and then leaves the average.

        Raises `CheckpointError` for the average of another model, and for damaged or missing files.
        """
        by_rank = {int(match[1]): file for file in (directory / DIRECTORY).glob("*") if (match := _NAME(file.name))}
        if not by_rank:
            return False
        if sorted(by_rank) != list(range(len(by_rank))):
            raise CheckpointError(f"{directory / DIRECTORY} lacks files; found those of ranks {sorted(by_rank)}")
        try:
            files = [safe_open(by_rank[rank], framework="pt") for rank in range(len(by_rank))]
            refuse_other_model(directory / DIRECTORY, set(files[0].keys()) ^ self._parameters.keys())
            wholes = {name: torch.cat([file.get_tensor(name).flatten() for file in files]) for name in self._parameters}
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{directory / DIRECTORY} cannot be read: {error}") from error
        for name, parameter in self._parameters.items():
            numel = _numel(parameter, self._distributed.zero_stage)
            if len(wholes[name]) != numel:
                raise CheckpointError(
                    f"{directory / DIRECTORY} is of another model: {name} has {len(wholes[name])} elements, expected "
                    f"{numel}"
                )
        for name, parameter in self._parameters.items():
            self._values[name].copy_(self._span(parameter).of(wholes[name]).view(self._values[name].shape))
        return True

    # This rank's elements

    def _local_elements(self) -> Mapping[str, Tensor]:
        """Return the elements of each parameter that this rank holds: aliases."""
        if self._distributed.zero_stage < 3:
            return {name: parameter.detach() for name, parameter in self._parameters.items()}
        return {
            name: parameter.ds_tensor.detach()[: self._span(parameter).count]  # type: ignore[attr-defined]
            for name, parameter in self._parameters.items()
        }

    def _span(self, parameter: nn.Parameter) -> Span:
        """Return the range of the flat parameter that this rank holds. The last rank's shard is padded beyond it."""
        numel = _numel(parameter, self._distributed.zero_stage)
        if self._distributed.zero_stage < 3:
            return Span(0, numel)
        size: int = parameter.partition_numel()  # type: ignore[attr-defined]
        begin = min(self._distributed.rank * size, numel)
        return Span(begin, min(size, numel - begin))

    @torch.no_grad()
    def _write(self, values: Mapping[str, Tensor]) -> None:
        if self._distributed.zero_stage == 3:  # forward passes leave parameters gathered, which would hide the new ones
            self._distributed.module.optimizer.checkpoint_event_prologue()  # type: ignore[operator,union-attr]
        for name, own in self._local_elements().items():
            own.copy_(values[name])

    def _gather_persistent(self) -> None:
        """Gather the parameters that DeepSpeed keeps whole; a collective under ZeRO-3."""
        if self._distributed.zero_stage == 3:
            self._distributed.module.optimizer.checkpoint_event_epilogue()  # type: ignore[operator,union-attr]


_NAME = re.compile(r"rank-(\d+)\.safetensors").fullmatch


def _numel(parameter: nn.Parameter, zero_stage: int) -> int:
    return parameter.numel() if zero_stage < 3 else int(parameter.ds_numel)  # type: ignore[attr-defined]
