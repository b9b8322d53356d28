"""Conflicts of settings with the launcher or the installation.

`trainer/update/optimizers/optimizer.py` raises the same messages for settings in a user's DeepSpeed file, which only it
knows, after the engine has started.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

from lockstep.trainer.config.groups.optimizer_settings import OptimizerConfig

NO_BITSANDBYTES = (
    "optimizer.name=adamw_8bit needs bitsandbytes, which is not installed; `pip install bitsandbytes`, or set "
    "optimizer.name=adamw"
)
MUON_UNDER_ZERO = (
    "optimizer.name=muon orthogonalizes whole matrices, but ZeRO gives every rank flat pieces of them; "
    "launch with configs/accelerate/ddp.yaml, or set optimizer.name=adamw"
)


def launch_problems(optimizer: OptimizerConfig) -> Iterator[str]:
    """Yield one sentence per conflict."""
    if launched_zero_stage() == 1:
        yield (
            "launched with ZeRO-1, whose optimizer in DeepSpeed reports no norm of the gradient; "
            "launch with configs/accelerate/zero2.yaml"
        )
    offload = os.environ.get("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "none")
    if launched_zero_stage() and offload != "none" and optimizer.name != "adamw":
        yield (
            f"optimizer.name={optimizer.name} with offload_optimizer_device={offload}, for which Accelerate "
            "replaces any optimizer by DeepSpeed's Adam; set optimizer.name=adamw, or offload_optimizer_device: none "
            "in the launch file"
        )
    if optimizer.name == "adamw_8bit" and importlib.util.find_spec("bitsandbytes") is None:
        yield NO_BITSANDBYTES
    if optimizer.name == "muon" and launched_zero_stage():
        yield MUON_UNDER_ZERO


def launched_zero_stage() -> int:
    """Return the ZeRO stage given to `accelerate launch`; 0 without one or with a DeepSpeed file of the user."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() != "true":
        return 0
    return int(os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "0"))
