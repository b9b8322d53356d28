"""Warnings and notes at the start that depend on the size of the model or on the loaded data."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from lockstep.rollout.environments.prompt import PromptReader
from lockstep.trainer.config.groups.optimizer_settings import OptimizerConfig
from lockstep.trainer.config.groups.outputs_settings import CheckpointConfig
from lockstep.trainer.data.prompts import DataSet
from lockstep.trainer.model.chosen import SMALL_MODEL
from lockstep.trainer.model.memory_plan import FLOAT32, OPTIMIZER_BYTES
from lockstep.trainer.model.shape import ModelShape

HIGH_LR = 1e-4
GB = 1e9
SHOWN_CHECKPOINT_BYTES = 1 * GB
MAX_COMPARED = 1_000_000
"""Rows of a training set that are compared with held-out rows, in about ten seconds."""


def size_warnings(shape: ModelShape, optimizer: OptimizerConfig, *, has_adapters: bool) -> Iterator[str]:
    """Yield one sentence per setting that is unusual for a model of this size."""
    is_full_adam = optimizer.name.startswith("adamw") and not has_adapters
    lr = optimizer.peak_lr
    if is_full_adam and shape.parameters > SMALL_MODEL and lr > HIGH_LR:
        yield (
            f"optimizer.lr={lr:g} for all weights of a model of {shape.parameters / 1e6:,.0f} M parameters; "
            "usual are 1e-6 to 1e-5, and 1e-5 to 2e-4 for adapters (model.lora.rank=16): set optimizer.lr=1e-6"
        )


def disk_notes(shape: ModelShape, settings: CheckpointConfig, *, optimizer: str, updates: int) -> Iterator[str]:
    """Yield the disk space of checkpoints and model if a checkpoint has more than 1 GB. updates: of the run."""
    one = FLOAT32 * shape.parameters + OPTIMIZER_BYTES[optimizer] * shape.trained
    if one <= SHOWN_CHECKPOINT_BYTES:
        return
    num_checkpoints = updates // settings.every + bool(updates % settings.every) if settings.every else 1
    most = min(num_checkpoints, settings.keep + 1)  # an older one is deleted after a new one is complete
    everything = most * one + FLOAT32 * shape.parameters
    yield (
        f"disk           about {one / GB:.2g} GB per checkpoint, {everything / GB:.2g} GB in all with the model "
        f"(checkpoint.every={settings.every}, checkpoint.keep={settings.keep})"
    )


def overlap_warnings(
    training: Sequence[DataSet], heldout: Mapping[str, DataSet], reader: PromptReader, *, evaluated: int | None
) -> Iterator[str]:
    """Yield one sentence per held-out set of which evaluated rows have the prompt of a training row.

    evaluated: number of evaluated rows of a set; None: all.
    """
    sought = {
        name: [_key(prompt) for prompt in islice(data.prompts(reader), evaluated)] for name, data in heldout.items()
    }
    heldout_keys = {key for keys in sought.values() for key in keys}
    prompts = (prompt for data in training for prompt in islice(data.prompts(reader), MAX_COMPARED))
    training_keys = {key for prompt in prompts if (key := _key(prompt)) in heldout_keys}
    for name, keys in sought.items():
        if both := sum(key in training_keys for key in keys):
            setting = f"eval.sets.{name}" if name else f"data.heldout_path={heldout[name].path}"
            yield (
                f"{both} of {len(keys)} evaluated rows of {setting} are also training rows: their rewards say what "
                "was learned by heart; take them out of one of the two"
            )


def _key(prompt: Any) -> int:
    return hash(prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=str))
