"""Parameters of xIELU, Apertus' activation, which vLLM holds in bfloat16 in a model of any dtype."""

from __future__ import annotations

import functools
from typing import Any

import torch

_REPAIRED = "_follows_model"


def install() -> None:
    """Hold them in the dtype of models built later; may be called repeatedly."""
    from vllm.model_executor.layers.activation import XIELU

    build = XIELU.__init__
    if _REPAIRED in build.__dict__:
        return

    @functools.wraps(build)
    def init(self: XIELU, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **{"dtype": torch.get_default_dtype(), **kwargs})  # which is that of the model meanwhile

    init.__dict__[_REPAIRED] = True
    XIELU.__init__ = init
