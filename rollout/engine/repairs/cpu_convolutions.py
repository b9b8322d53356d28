"""Convolutions of Mamba layers on a CPU in bfloat16, whose weights vLLM packs, so that weight syncs miss them.

The layers compute with a view of the weight. Packing, on CPUs with AVX-512 for bfloat16, gives the weight other memory,
and the view keeps the first values: after a sync the engine would sample with old convolutions. They stay unpacked
here, as their kernels take them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_REPAIRED = "_is_reached"


def install() -> None:
    """Repair layers built later; may be called repeatedly."""
    from vllm.model_executor.layers.mamba.mamba_mixer import MambaMixer
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
    from vllm.model_executor.layers.mamba.short_conv import ShortConv

    for mixer, name in ((MambaMixer, "conv1d"), (MambaMixer2, "conv1d"), (ShortConv, "conv")):
        if _REPAIRED not in mixer.__init__.__dict__:
            mixer.__init__ = _unpacked(mixer.__init__, name)


def _unpacked(initialize: Callable[..., None], name: str) -> Callable[..., None]:
    @functools.wraps(initialize)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        getattr(self, name)._cpu_skip_gemm_dispatch = True

    __init__.__dict__[_REPAIRED] = True
    return __init__
