"""Names of a transformers model's weights in its checkpoint, and where each tensor of the checkpoint lies in the model.

transformers stacks the experts of a layer in one tensor and renames modules; checkpoints, and so vLLM's loaders, have
tensors per expert under the names of the model's authors:

    mlp.experts.gate_up_proj (E, 2I, D)  ->  mlp.experts.<e>.gate_proj.weight, mlp.experts.<e>.up_proj.weight (I, D)

`save_pretrained` reverts that (`transformers.core_model_loading.revert_weight_conversion`, 5.19). Here the same
function runs on tensors without memory. A checkpoint tensor that it makes is a view of one of them, whose offset and
strides say which elements of which tensor of the model it has. So nothing is copied, and sharded weights work alike.

Covered: every conversion that selects, splits or renames. Refused: conversions that compute or join (`torch.cat`,
transposition), which none of the decoders of docs/models.md has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from lockstep.rollout.errors import SyncError

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor of the checkpoint, as consecutive elements of a tensor of the model."""

    name: str
    """In the checkpoint."""
    source: str
    """Name of the tensor in the model."""
    first: int
    """Its first element there."""
    shape: Shape


def checkpoint_places(model: nn.Module, shapes: Mapping[str, Shape]) -> Iterator[Place]:
    """Yield the places of all checkpoint tensors, in the order of the model's tensors.

    shapes: by the names of parameters and buffers of `model`, each as it is when it is not sharded. Raises `SyncError`
    if a tensor of the checkpoint is not a part of one tensor of the model. A module that is not a model of transformers
    has its own names.
    """
    if not isinstance(model, PreTrainedModel):
        yield from (Place(name, name, 0, shape) for name, shape in shapes.items())
        return
    sources = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    with _WithoutCopies():
        converted_tensors: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(sources))
    by_storage = {_storage(tensor): name for name, tensor in sources.items()}
    places_by_name: dict[str, list[Place]] = {name: [] for name in sources}
    for name, tensor in converted_tensors.items():
        source = by_storage.get(_storage(tensor))
        if source is None or not tensor.is_contiguous():
            raise SyncError(
                f"weight sync cannot send {name}, which transformers computes from other tensors when it saves a "
                f"{model.config.get_text_config().model_type} model; set model.path to a model of a family in "
                "docs/models.md"
            )
        places_by_name[source].append(Place(name, source, int(tensor.storage_offset()), tuple(tensor.shape)))
    for name, places in places_by_name.items():
        if sum(math.prod(place.shape) for place in places) != math.prod(shapes[name]):
            raise SyncError(f"weight sync: transformers saves {name} in part only, {len(places)} tensors of it")
        yield from places


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _WithoutCopies(TorchDispatchMode):
    """Makes `contiguous` and `clone` return a view, so that a result keeps the storage of its source."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            (tensor,) = args
            return tensor.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        return func(*args, **(kwargs or {}))
