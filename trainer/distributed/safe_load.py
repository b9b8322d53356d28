"""DeepSpeed's checkpoints without unpickling: what is loaded are tensors and four classes of DeepSpeed's own.

DeepSpeed 0.19.8 calls `torch.load(weights_only=False)`, which runs whatever a file says. Torch has a switch that
overrules the caller; with the classes that DeepSpeed's state holds allowed by name, its own loader works under it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

SWITCH = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


@contextmanager
def weights_only_loading() -> Iterator[None]:
    """Inside, `torch.load` is weights-only, whoever calls it with whatever arguments. Raises pickle.UnpicklingError
    there for a file that holds anything else."""
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
