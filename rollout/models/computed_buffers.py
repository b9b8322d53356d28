"""Buffers that a model computes from its config, such as the frequencies of rotary positions.

No file has them. `deepspeed.zero.Init` computes them in the dtype of the weights, bfloat16 under ZeRO-3, and
`from_pretrained` leaves those of a user's own class without values. Here all are a new module's, to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from lockstep.rollout.models.stored_model import whole_models


def set_buffers(model: PreTrainedModel, stored: Callable[[str], torch.Tensor | None]) -> None:
    """Give the model the computed buffers of a new module, and its stored ones in the dtype that they have there.

    stored: reads a tensor from the files of the model, by its name in the model; None: they have none.
    """
    for owner, leaf, name, new in _buffers(model):
        value = new if leaf in owner._non_persistent_buffers_set else stored(name)
        if value is not None:
            owner._buffers[leaf] = value.to(device=model.get_buffer(name).device, dtype=new.dtype)


def wrong_buffer(model: PreTrainedModel) -> str | None:
    """Return in words the first computed buffer that is not a new module's in dtype and value; None without one."""
    for owner, leaf, name, new in _buffers(model):
        buffer = model.get_buffer(name).cpu()
        is_computed = leaf in owner._non_persistent_buffers_set
        if is_computed and (buffer.dtype != new.dtype or not torch.equal(buffer, new)):
            first, expected = (f"{one.flatten()[:3].tolist()} of {one.dtype}" for one in (buffer, new))
            return f"{name} begins with {first}, expected {expected}"
    return None


def _buffers(model: PreTrainedModel) -> Iterator[tuple[nn.Module, str, str, torch.Tensor]]:
    """Yield each buffer's module in the model, its name there and in the model, and its value in a new module."""
    for name, new in _new_module(model).named_buffers(remove_duplicate=False):
        path, _, leaf = name.rpartition(".")
        if not new.is_meta:  # without a value of its own
            yield model.get_submodule(path), leaf, name, new


def _new_module(model: PreTrainedModel) -> PreTrainedModel:
    """Make a module of the model's class and config in float32 on the CPU, whose parameters take no memory."""
    hook = register_module_parameter_registration_hook(_without_memory)
    config = deepcopy(model.config)
    config.dtype = torch.float32  # of the parts that are made from it
    try:
        with whole_models(), no_init_weights(), _EmptyOnMeta(), torch.device("cpu"):
            return type(model)(config)
    finally:
        hook.remove()


def _without_memory(module: nn.Module, name: str, parameter: nn.Parameter) -> Any:
    return nn.Parameter(parameter.to("meta"), requires_grad=False)


class _EmptyOnMeta(TorchFunctionMode):
    """Makes `torch.empty` take no memory: experts of one layer may have 30 GiB."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        return func(*args, **{**(kwargs or {}), **({"device": "meta"} if func is torch.empty else {})})
