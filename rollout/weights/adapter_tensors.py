"""Mapping of a model's LoRA adapters to tensors for weight transfer to an engine that applies adapters itself.

    y = W x + B A x        A: rank × in; B: out × rank, multiplied by the layer's scale before it is sent

Two tensors per adapted layer, `<layer>.lora_A.weight` and `<layer>.lora_B.weight`, under the layer's name in the
checkpoint. The scale (alpha / rank, or alpha / sqrt(rank) with rsLoRA) is in B, so that the engine needs no settings
of the adapter.

Covered: LoRA on linear layers. Refused, being weights that no adapter holds: `modules_to_save`, and adapters on stacked
experts, embeddings and convolutions; several active adapters; DoRA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from vllm.distributed.weight_transfer.base import ParamMeta

from lockstep.rollout.errors import SyncError
from lockstep.rollout.weights.checkpoint_names import Place, checkpoint_places
from lockstep.rollout.weights.checkpoint_tensors import CheckpointTensor, peft_layers, sent_dtype
from lockstep.rollout.weights.shards import ParamRange, full_shape

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

MERGE_INSTEAD = "set model.lora.send=merged"


def adapter_tensors(model: nn.Module, dtype: torch.dtype | None) -> Iterator[CheckpointTensor]:
    """Yield A and scaled B of every adapted layer. dtype: that of the engine; None: that of the parameters.

    Raises `SyncError` if something is trained that these tensors do not hold.
    """
    from peft import PeftModel

    if not isinstance(model, PeftModel):
        raise SyncError(
            f"the engines take adapters, and the trained {type(model).__name__} has none; set model.lora.rank=16, or "
            "start the engines without --enable-lora"
        )
    tensors, adapted_layers = peft_layers(model)
    param_ids: set[int] = set()
    for place in checkpoint_places(model.get_base_model(), {name: full_shape(one) for name, one in tensors.items()}):
        if place.source not in adapted_layers:
            continue
        layer = adapted_layers[place.source]
        a, b, scale = _only_adapter(layer, place, full_shape(tensors[place.source]))
        param_ids |= {id(a), id(b)}
        name = place.name.removesuffix(".weight")
        yield _tensor(f"{name}.lora_A.weight", a, dtype)
        yield _tensor(f"{name}.lora_B.weight", b, dtype, None if scale == 1 else _times(scale))
    left_out = [name for name, param in model.named_parameters() if param.requires_grad and id(param) not in param_ids]
    if left_out:
        raise SyncError(
            f"weight sync sends adapters alone, and {len(left_out)} trained parameters are none, first {left_out[0]}; "
            f"{MERGE_INSTEAD}"
        )


def _tensor(
    name: str,
    param: nn.Parameter,
    dtype: torch.dtype | None,
    merge: Callable[[Sequence[torch.Tensor]], torch.Tensor] | None = None,
) -> CheckpointTensor:
    shape, wire_dtype = full_shape(param), sent_dtype(param, dtype)
    source = wire_dtype if merge is None else param.dtype  # scaled before it is rounded
    return CheckpointTensor(ParamMeta(name, wire_dtype, shape), (ParamRange(param, 0, shape, source),), merge)


def _times(scale: float) -> Callable[[Sequence[torch.Tensor]], torch.Tensor]:
    return lambda values: values[0].to(torch.float32) * scale


def _only_adapter(
    layer: LoraLayer, place: Place, weight_shape: tuple[int, ...]
) -> tuple[nn.Parameter, nn.Parameter, float]:
    """Return A, B and scale of a layer's active adapter. Raises `SyncError` if it is not plain LoRA on a matrix."""
    active = [name for name in layer.active_adapters if name in layer.scaling]
    problem = None
    if len(active) != 1 or layer.disable_adapters or layer.merged_adapters:
        problem = f"expected one active, unmerged adapter, found {active}, merged {layer.merged_adapters}"
    elif place.shape != weight_shape:
        problem = "checkpoints have its weight in parts"
    elif layer.lora_magnitude_vector:
        problem = "it has DoRA's magnitudes, which vLLM does not apply"
    elif active[0] not in layer.lora_A or not isinstance(layer.lora_A[active[0]], nn.Linear):
        problem = "it is not a linear layer"
    if problem is not None:
        raise SyncError(f"weight sync cannot send the adapter of {place.source}: {problem}; {MERGE_INSTEAD}")
    a, b = layer.lora_A[active[0]], layer.lora_B[active[0]]
    if a.bias is not None or b.bias is not None:
        raise SyncError(f"weight sync cannot send the adapter of {place.source}: it has a bias; {MERGE_INSTEAD}")
    assert isinstance(a.weight, nn.Parameter)
    assert isinstance(b.weight, nn.Parameter)
    return a.weight, b.weight, float(layer.scaling[active[0]])
