"""Values of `optimizer.lr` and `token_budget` where they are null: chosen by the model's size and the memory plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lockstep.trainer.config.groups.optimizer_settings import SMALL_MODEL_LR
from lockstep.trainer.config.schema import PACK_TOKENS, Config
from lockstep.trainer.distributed.sharding import Sharding
from lockstep.trainer.model.memory_plan import USABLE, cache_gib, memory_plan
from lockstep.trainer.model.shape import ModelShape

SMALL_MODEL = 50_000_000
"""Parameters up to which `SMALL_MODEL_LR` is the default; it destroys larger, pretrained models."""
LARGE_MODEL_LR = 1e-6
ADAPTER_LR = 1e-5
"""Default for adapters of a model above `SMALL_MODEL`."""


def with_chosen(
    config: Config, shape: ModelShape, sharding: Sharding, *, available: int, say: Callable[[str], None]
) -> Config:
    """Return the configuration without nulls in `optimizer.lr` and `token_budget`.

    available: bytes of the device. say: receives a sentence for each value that is not the one of small models.
    """
    if config.optimizer.lr is None:
        lr = default_lr(config, shape)
        config = replace(config, optimizer=replace(config.optimizer, lr=lr))
        if lr != SMALL_MODEL_LR:
            what = "adapters" if config.model.lora.rank else "all weights"
            say(f"optimizer.lr={lr:g} for {what} of a model of {shape.parameters / 1e6:,.0f} M parameters")
    if config.token_budget is None:
        tokens = affordable_tokens(config, shape, sharding, available=available)
        config = replace(config, token_budget=tokens)
        if tokens != PACK_TOKENS:
            say(f"token_budget={tokens}, which the memory plan leaves")
    return config


def default_lr(config: Config, shape: ModelShape) -> float:
    """Return the peak learning rate of a model of this size."""
    if shape.parameters <= SMALL_MODEL:
        return SMALL_MODEL_LR
    return ADAPTER_LR if config.model.lora.rank else LARGE_MODEL_LR


def affordable_tokens(config: Config, shape: ModelShape, sharding: Sharding, *, available: int) -> int:
    """Return the largest power of two, at most `PACK_TOKENS`, with which the plan takes at most `USABLE` of the memory.

    The smallest is the first that holds no row of `rollout.max_model_len` tokens, because less saves nothing. If the
    engine's cache takes what is left (`rollout.kv_cache_gib=null` on a GPU), it is left as much as the update takes.
    """
    tokens = PACK_TOKENS
    while tokens > config.rollout.max_model_len:
        plan = memory_plan(shape, replace(config, token_budget=tokens), sharding)
        shares = cache_gib(config) is None and not plan.engine_sleeps
        if plan.total + (plan.activations + plan.logits) * shares <= USABLE * available:
            break
        tokens //= 2
    return tokens
