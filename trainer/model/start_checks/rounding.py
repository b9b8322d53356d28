"""Effect of rounding on a model's log-probabilities: a rounding error in the output of each layer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

TF32_ROUNDING = 2.0**-10
"""Relative rounding of products in TensorFloat-32, in which vLLM's Triton kernels compute attention in float32."""


def rounding_of(dtype: torch.dtype, device_type: str) -> float:
    """Return the relative rounding of the products of an engine."""
    return TF32_ROUNDING if (dtype, device_type) == (torch.float32, "cuda") else torch.finfo(dtype).eps


def marked_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Return the layers that transformers marks, by name, without layers inside layers."""
    layers: dict[str, nn.Module] = {}
    for name, part in module.named_modules():
        if isinstance(part, GradientCheckpointingLayer) and not any(name.startswith(f"{outer}.") for outer in layers):
            layers[name] = part
    return layers


@contextlib.contextmanager
def rounding_errors(module: nn.Module, size: float) -> Iterator[None]:
    """Multiply the outputs of the layers of a module inside the block by random numbers of 1 ± size; 0: do nothing.

    The random numbers are the same in each block.
    """
    generators: dict[torch.device, torch.Generator] = {}

    def disturb(_: nn.Module, arguments: Any, output: Any) -> Any:
        states, *others = output if isinstance(output, tuple) else (output,)
        device = states.device
        generator = generators.setdefault(device, torch.Generator(device).manual_seed(0))
        noise = torch.rand(states.shape, generator=generator, device=device) * 2 - 1
        noisy_states: Tensor = (states.float() * (1 + size * noise)).to(states.dtype)
        return (noisy_states, *others) if isinstance(output, tuple) else noisy_states

    with contextlib.ExitStack() as stack:
        for layer in marked_layers(module).values() if size else ():
            stack.callback(layer.register_forward_hook(disturb).remove)
        yield
