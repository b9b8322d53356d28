"""Loading of DeepSpeed checkpoints without running code from them.

DeepSpeed 0.19.8 calls `torch.load(weights_only=False)`, which executes pickles. Torch's environment switch overrides
the caller; with the four classes of DeepSpeed's state allowed by name, DeepSpeed's loader works under it.

Covered: every `torch.load` in the block. Not covered: a forged checkpoint can still contain other weights.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

SWITCH = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


@contextmanager
def weights_only_loading() -> Iterator[None]:
    """Force `torch.load` to be weights-only inside the block, whatever its caller passes.

    `torch.load` then raises pickle.UnpicklingError for a file that holds anything else.
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
