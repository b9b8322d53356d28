"""The loader of every model that computes something: policy, critic, reference, reward model, teacher.

files judged without values ─► `from_pretrained` ─► buffers of a new module ─► every value finite
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig, PreTrainedModel

from lockstep.rollout.models.computed_buffers import set_buffers
from lockstep.rollout.models.generation import mend_generation
from lockstep.rollout.models.stored_model import Role, is_finite, read_config, refuse_non_finite, stored_model


def load_model(
    role: Role,
    path: str | Path,
    *,
    setting: str,
    dtype: torch.dtype | str,
    trust_remote_code: bool,
    config: PreTrainedConfig | None = None,
    dequantizing: Mapping[str, Any] | None = None,
    device_map: str | None = None,
) -> PreTrainedModel:
    """Load a model from a directory or a hub id; a collective under ZeRO-3.

    setting: name of the path's setting, for errors. config: that of the files, if it was read before. dequantizing:
    arguments of `from_pretrained` for quantized weights. Raises `ConfigError` as `stored_model`, and with the names of
    tensors whose values are not finite.
    """
    config = config or read_config(path, setting=setting, trust_remote_code=trust_remote_code)
    loading = {"config": config, "trust_remote_code": trust_remote_code, **(dequantizing or {})}
    stored_weights = stored_model(role, path, setting=setting, **loading)
    model = role.auto.from_pretrained(path, dtype=dtype, device_map=device_map, **loading)
    set_buffers(model, stored_weights.read)
    mend_generation(model)
    refuse_non_finite(_non_finite(model), setting=setting, path=path)
    return model


@torch.no_grad()
def _non_finite(model: PreTrainedModel) -> list[str]:
    """Return the names of tensors with NaN or infinities; a collective under ZeRO-3, where ranks see their shards."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    names = [name for name, tensor in tensors.items() if tensor.is_floating_point()]
    bad = torch.tensor([int(not is_finite(_held(tensors[name]))) for name in names])
    if any("ds_tensor" in vars(tensor) for tensor in tensors.values()):
        bad = bad.to(model.device)
        dist.all_reduce(bad, dist.ReduceOp.MAX)
    return [name for name, one in zip(names, bad.tolist(), strict=True) if one]


def _held(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor: under ZeRO-3 its shard, without padding, which may have any value."""
    if (shard := vars(tensor).get("ds_tensor")) is None:
        return tensor
    before = vars(tensor)["ds_zero_partition_rank"] * shard.numel()
    return shard[: max(0, vars(tensor)["ds_numel"] - before)]
