"""Values of `optimizer.lr`, `token_budget`, `model.gradient_checkpointing` and `model.compile` where they are null, by
the model, its memory plan and the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch

from lockstep.rollout.errors import ConfigError
from lockstep.trainer.config.groups.model_settings import ModelConfig
from lockstep.trainer.config.groups.optimizer_settings import SMALL_MODEL_LR
from lockstep.trainer.config.schema import PACK_TOKENS, Config
from lockstep.trainer.distributed.sharding import Sharding
from lockstep.trainer.model.memory_plan import USABLE, MemoryPlan, cache_gib, memory_plan
from lockstep.trainer.model.shape import ModelShape

SMALL_MODEL = 50_000_000
"""Parameters up to which `SMALL_MODEL_LR` is the default; it destroys larger, pretrained models."""
LARGE_MODEL_LR = 1e-6
ADAPTER_LR = 1e-5
"""Default for adapters of a model above `SMALL_MODEL`."""
FULL_SPEED_TOKENS = 4096
"""Tokens of a pack below which a GPU computes less per pass over weights and gradients than it could [arithmetic: 6
FLOP per token and weight against about 20 bytes per weight]."""


def with_chosen(
    config: Config,
    shape: ModelShape,
    sharding: Sharding,
    *,
    available: int,
    say: Callable[[str], None],
    on_gpu: bool | None = None,
) -> Config:
    """Return the configuration without nulls in `optimizer.lr`, `token_budget` and `model.gradient_checkpointing`.

    available: bytes of the device. say: receives a sentence for each value that is not the one of small models. on_gpu:
    as in `memory_plan`. Raises `ConfigError` if a value is to be chosen and no choice fits into memory.
    """
    if config.optimizer.lr is None:
        lr = default_lr(shape, has_adapters=config.model.lora.rank > 0)
        config = replace(config, optimizer=replace(config.optimizer, lr=lr))
        if lr != SMALL_MODEL_LR:
            what = "adapters" if config.model.lora.rank else "all weights"
            say(f"optimizer.lr={lr:g} for {what} of a model of {shape.parameters / 1e6:,.0f} M parameters")
    if config.token_budget is not None and config.model.gradient_checkpointing is not None:
        return config
    on_gpu = torch.cuda.is_available() if on_gpu is None else on_gpu
    setting, longest = config.model.gradient_checkpointing, config.rollout.max_model_len
    candidates = (
        replace(config, token_budget=tokens, model=replace(config.model, gradient_checkpointing=is_checkpointed))
        for tokens, is_checkpointed in choices(config.token_budget, setting, longest=longest, on_gpu=on_gpu)
    )
    plans = (memory_plan(shape, candidate, sharding, on_gpu=on_gpu) for candidate in candidates)
    plan = first_that_fits(plans, available=available, on_gpu=on_gpu)
    if config.token_budget is None and plan.pack_tokens != PACK_TOKENS:
        say(f"token_budget={plan.pack_tokens}, which the memory plan leaves")
    if setting is None and plan.model.is_checkpointed:
        say("model.gradient_checkpointing=true, without which the memory plan does not fit")
    return replace(config, token_budget=plan.pack_tokens, model=plan.model)


def with_compilation(
    model: ModelConfig, shape: ModelShape, *, device_type: str, say: Callable[[str], None]
) -> ModelConfig:
    """Return the settings without null in `model.compile`: true on a GPU. say: receives why a GPU compiles nothing.

    On a CPU compiling takes longer than most runs gain by it.
    """
    if model.compile is not None:
        return model
    on_gpu = device_type == "cuda"
    if on_gpu and not shape.compilable:
        say("model.compile=false, because transformers marks no layers of this model, or only recurrent ones")
    return replace(model, compile=on_gpu and shape.compilable > 0)


def first_that_fits(plans: Iterable[MemoryPlan], *, available: int, on_gpu: bool) -> MemoryPlan:
    """Return the first of the plans that takes at most `USABLE` of the memory, or else the last one.

    If the engine's cache takes what is left (`rollout.kv_cache_gib=null` on a GPU), it is left as much as the update
    takes. Raises `ConfigError` if the last one takes more than all of the memory.
    """
    for plan in plans:
        shares = plan.engine_weights > 0 and cache_gib(plan.rollout, on_gpu=on_gpu) is None and not plan.engine_sleeps
        if plan.total + (plan.activations + plan.logits) * shares <= USABLE * available:
            return plan
    if (problem := plan.advice(available=available)) is not None:
        with_it = " and gradient checkpointing" if plan.model.is_checkpointed else ""
        raise ConfigError(
            f"the run does not fit into memory: with {plan.pack_tokens} tokens per pack{with_it} {problem}. "
            f"{plan.table()}. To try it nevertheless, set token_budget={plan.pack_tokens} "
            f"model.gradient_checkpointing={str(plan.model.is_checkpointed).lower()}"
        )
    return plan


def default_lr(shape: ModelShape, *, has_adapters: bool) -> float:
    """Return the peak learning rate of a model of this size."""
    if shape.parameters <= SMALL_MODEL:
        return SMALL_MODEL_LR
    return ADAPTER_LR if has_adapters else LARGE_MODEL_LR


def choices(
    token_budget: int | None, is_checkpointed: bool | None, *, longest: int, on_gpu: bool
) -> Iterator[tuple[int, bool]]:
    """Yield the possible values of `token_budget` and `model.gradient_checkpointing`, of which some are null, the
    fastest first.

    Budgets are powers of two, down to the first that holds no row of `longest` tokens, because less saves nothing.
    Checkpointing costs a third of an update; on a GPU, packs below `FULL_SPEED_TOKENS` cost more.
    """
    budgets = [PACK_TOKENS] if token_budget is None else [token_budget]
    while token_budget is None and budgets[-1] > longest:
        budgets.append(budgets[-1] // 2)
    for checkpoints in (False, True) if is_checkpointed is None else (is_checkpointed,):
        for tokens in budgets:
            is_slow = on_gpu and not checkpoints and tokens < min(FULL_SPEED_TOKENS, budgets[0])
            if is_checkpointed is not None or not is_slow:
                yield tokens, checkpoints
