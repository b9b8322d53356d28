"""Check at the start of a run that each layer computes what its weights say, at every distance.

One long row passes through the model as it is trained: its kernels, its precision, its shards. Then each layer alone
computes the same inputs again in float32, by transformers' own `eager` code. A layer whose outputs differ by more than
the rounding of the computation's dtype is named: its kernel masks wrongly beyond some distance, or it computes in a
narrower dtype, or rotates by other frequencies.

Covered: layers that transformers marks (`GradientCheckpointingLayer`), whole weights or shards of ZeRO-3, adapters.
Not covered: the head (`Policy` compares it), quantized base weights, whose values have no float32.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lockstep.rollout.errors import ConfigError
from lockstep.rollout.models.computed_buffers import wrong_buffer
from lockstep.trainer.batch.packing import PackedBatch, collate, whole_row
from lockstep.trainer.model import decoder
from lockstep.trainer.model.layers import chunked_attention
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.model.start_checks.rounding import marked_layers

TOKENS = {"cuda": 1500, "cpu": 500}
"""Tokens of the row that a run computes at its start, by type of device: about a second."""
PARTS = 4
"""Parts of the row, whose medians are compared with the bound: a fault may begin at a distance, and a median leaves out
tokens that another expert computes because its router rounds."""
OUTPUT = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2**-7}
"""Accepted difference, as a share of the layer's output: the residual is rounded once or twice."""
BRANCH = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 2**-4}
"""The same as a share of what the layer adds to its input, which several products round."""

Gather = Callable[[nn.Module], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Difference of one layer from its computation in float32."""

    layer: str
    worst: float
    """Largest median of a part of the row, as a multiple of the accepted difference."""
    first: int
    last: int
    """Positions of that part."""


def differences(
    policy: Policy, run: Callable[[PackedBatch], object], *, length: int, dtype: torch.dtype, gather: Gather
) -> list[Difference]:
    """Return the difference of each layer on a random row of `length` tokens; a collective under ZeRO-3.

    run: computes a pack as in training. dtype: of the computation. gather: makes the weights of a layer whole.
    """
    generator = torch.Generator().manual_seed(0)
    device = next(policy.parameters()).device
    row = whole_row(torch.randint(policy.vocab_size, (length,), generator=generator).tolist())
    packed = collate([row], [0], device=device)
    layers = marked_layers(policy.causal_lm.get_decoder())
    with torch.no_grad():
        with _recording(layers) as training_records:
            run(packed)
        model = policy.causal_lm
        attention = decoder.attention_of(model)
        model.set_attn_implementation("eager")
        try:
            with _recording(layers) as eager:
                run(packed)
            return [
                _difference(name, layer, training_records[name], eager[name].arguments, dtype=dtype, gather=gather)
                for name, layer in layers.items()
            ]
        finally:
            model.set_attn_implementation(attention)


def check(
    policy: Policy, run: Callable[[PackedBatch], object], *, length: int, dtype: torch.dtype, gather: Gather
) -> None:
    """Raise `ConfigError` with the name of the first computed buffer or layer that differs; arguments as of
    `differences`."""
    if (wrong := wrong_buffer(policy.causal_lm)) is not None:
        raise ConfigError(
            f"the buffer {wrong}: the launcher or a wrapper has changed what {type(policy.causal_lm).__name__} "
            "computes from its config. Report it with the launch file"
        )
    for one in differences(policy, run, length=length, dtype=dtype, gather=gather):
        if not one.worst <= 1.0:
            raise ConfigError(
                f"{one.layer} differs from its computation in float32 by {one.worst:.2g} times what rounding to "
                f"{str(dtype).removeprefix('torch.')} explains, at tokens {one.first} to {one.last} of a row: training "
                "would use other log-probabilities than the model's. Compare with model.attn_implementation=eager and "
                "model.dtype=float32, and report it"
            )


@dataclass(slots=True)
class _Record:
    """One call of a layer."""

    arguments: tuple[tuple[Any, ...], Mapping[str, Any]]
    output: Tensor


@contextlib.contextmanager
def _recording(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, _Record]]:
    """Record the arguments and the output of each layer inside the block."""
    records: dict[str, _Record] = {}

    def record(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
            states = output[0] if isinstance(output, tuple) else output
            records[name] = _Record(arguments=(args, dict(kwargs)), output=states.detach().clone())

        return hook

    def clone(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return (args[0].clone(), *args[1:]), kwargs  # layers may write into their input

    with contextlib.ExitStack() as stack:
        for name, layer in layers.items():
            stack.callback(layer.register_forward_hook(record(name), with_kwargs=True).remove)
            stack.callback(layer.register_forward_pre_hook(clone, with_kwargs=True).remove)
        yield records


def _difference(
    name: str,
    layer: nn.Module,
    trained: _Record,
    eager: tuple[tuple[Any, ...], Mapping[str, Any]],
    *,
    dtype: torch.dtype,
    gather: Gather,
) -> Difference:
    (states, *_), _ = trained.arguments
    (_, *others), kwargs = tree_map(_widened, eager)
    with gather(layer):
        twin = _twin(layer)
    device_type = states.device.type
    with torch.autocast(device_type, enabled=False):
        output = twin(states.float(), *others, **kwargs)
    exact = output[0] if isinstance(output, tuple) else output
    apart = (trained.output.float() - exact).norm(dim=-1).flatten()
    tolerance = OUTPUT[dtype] * exact.norm(dim=-1) + BRANCH[dtype] * (exact - states.float()).norm(dim=-1)
    # A token whose embedding is 0, as padding's, can leave the layer as 0: nothing is accepted there, nor apart.
    parts = torch.where(apart == 0, 0.0, apart / tolerance.flatten()).chunk(PARTS)
    medians = [part.median().item() for part in parts]
    worst = max(range(len(parts)), key=lambda part: medians[part])
    first = sum(len(part) for part in parts[:worst])
    return Difference(layer=name, worst=medians[worst], first=first, last=first + len(parts[worst]) - 1)


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def _twin(module: nn.Module) -> nn.Module:
    """Copy a module in float32 without what was added to the instance: hooks, patched forwards, compilations."""
    twin = module.__class__.__new__(module.__class__)
    own = {name: value for name, value in vars(module).items() if name not in ("forward", "_compiled_call_impl")}
    vars(twin).update(own | chunked_attention.plain_attributes(module))
    for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        vars(twin)[name] = OrderedDict()
    vars(twin)["_compiled_call_impl"] = None
    vars(twin)["training"] = False
    vars(twin)["_parameters"] = {
        name: None if parameter is None else nn.Parameter(_widened(parameter.detach().clone()), requires_grad=False)
        for name, parameter in module._parameters.items()
    }
    vars(twin)["_buffers"] = {
        name: None if buffer is None else _widened(buffer).clone() for name, buffer in module._buffers.items()
    }
    vars(twin)["_modules"] = {name: None if child is None else _twin(child) for name, child in module._modules.items()}
    return twin
