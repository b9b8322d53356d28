"""Division of weights, gradients and optimizer state over ranks, and the buffers that DeepSpeed takes for it."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

PARAMETERS, OPTIMIZER = "parameters.safetensors", "optimizer.pt"
"""Files of a checkpoint whose weights are not sharded."""
GATHERED_WHOLE = "is_gathered_whole"
"""Attribute of a module whose weights ZeRO-3 gathers at once, with its hooks outside of the module's forward pass."""
REDUCE, LIVE = "reduce_bucket_size", "stage3_max_live_parameters"
BUFFERS = {REDUCE: 100_000_000, LIVE: 500_000_000, "stage3_max_reuse_distance": 500_000_000}
"""Sizes of DeepSpeed's buffers in parameters, where the user's configuration names none.

A bucket of gradients takes 0.37 GiB in float32 and is still large for a reduction; DeepSpeed's default takes 1.9 GiB.
Gathered weights take up to 0.93 GiB in bfloat16, two layers of a 7B model; DeepSpeed's default is twice that.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    world_size: int = 1
    zero_stage: int = 0
    uses_deepspeed: bool = False
    """True if float32 masters are kept beside the weights; otherwise the weights are the masters."""
    reduce_bucket: int = 0
    """Largest number of gradients that DeepSpeed reduces at once."""
    live_parameters: int = 0
    """Largest number of parameters that ZeRO-3 keeps gathered."""
    offloads_optimizer: bool = False
    """True if masters, gradients and optimizer state are in main memory."""
    offloads_weights: bool = False
    """True if ZeRO-3 keeps its shards of the weights in main memory."""

    @classmethod
    def of(cls, *, world_size: int, zero_stage: int, deepspeed_config: MutableMapping[str, Any] | None) -> Sharding:
        """deepspeed_config: after `set_buffers`; None without DeepSpeed."""
        if deepspeed_config is None:
            return cls(world_size=world_size)
        zero = deepspeed_config["zero_optimization"]
        return cls(
            world_size=world_size,
            zero_stage=zero_stage,
            uses_deepspeed=True,
            reduce_bucket=int(zero[REDUCE]),
            live_parameters=int(zero[LIVE]),
            offloads_optimizer=_is_offloaded(zero, "offload_optimizer"),
            offloads_weights=zero_stage == 3 and _is_offloaded(zero, "offload_param"),
        )


def _is_offloaded(zero: Mapping[str, Any], name: str) -> bool:
    return (zero.get(name) or {}).get("device", "none") != "none"


def set_buffers(deepspeed_config: MutableMapping[str, Any]) -> None:
    """Write `BUFFERS` into a DeepSpeed configuration, except over numbers that it has."""
    zero = deepspeed_config.setdefault("zero_optimization", {})
    for name, parameters in BUFFERS.items():
        if zero.get(name, "auto") == "auto":
            zero[name] = parameters
