"""Values that can never be right, whatever the other settings are: numbers, and words that are none of the choices."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterator, Mapping
from typing import Any

from trainer.config.hints import closest
from trainer.config.schema import Config, OptimizerConfig
from trainer.update.update_guard import MIN_NORMS

UNBOUNDED = ("correction.high", "correction.alarm_kl", "correction.alarm_k3", "algorithm.clip_high")
"""Settings that infinity switches off."""


def number_problems(config: Config) -> Iterator[str]:
    """One sentence per number that is not finite or out of its bounds."""
    yield from not_finite("", config)
    yield from _ranges(config)
    yield from _intervals(config)
    yield from optimizer_problems(config.optimizer)


def optimizer_problems(optimizer: OptimizerConfig) -> Iterator[str]:
    """Numbers of the optimizer that are out of their bounds."""
    positive = {"lr": optimizer.lr, "eps": optimizer.eps}
    yield from _not_positive({f"optimizer.{name}": value for name, value in positive.items()})
    not_negative = {
        "optimizer.weight_decay": optimizer.weight_decay,
        "optimizer.max_grad_norm": optimizer.max_grad_norm,
        "optimizer.warmup_updates": optimizer.warmup_updates,
    }
    yield from _negative(not_negative)
    intervals = {
        "optimizer.momentum": (optimizer.momentum, 0, 1, 0.95),
        "optimizer.final_lr_fraction": (optimizer.final_lr_fraction, 0, 1, 0.0),
    }
    yield from _outside(intervals)
    if len(optimizer.betas) != 2 or not all(0 <= beta < 1 for beta in optimizer.betas):
        yield f"optimizer.betas={optimizer.betas} must be two numbers in [0, 1); set optimizer.betas=[0.9,0.95]"


def choice_problems(node: Any, prefix: str = "") -> Iterator[str]:
    """One sentence per setting that has choices and is none of them. node: a dataclass of settings."""
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        name = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from choice_problems(value, f"{name}.")
        choices = field.metadata.get("choices")
        if choices and value not in choices:
            words = [str(choice) for choice in choices]
            hint = closest(str(value), words)
            yield f"{name}={value} is not one of {', '.join(words)}{hint}; set {name}={words[0]}"


def not_finite(prefix: str, node: Any) -> Iterator[str]:
    """NaN passes every comparison below, and infinity most; both would be found by the first update, in its loss."""
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        name = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from not_finite(f"{name}.", value)
        elif isinstance(value, float) and not math.isfinite(value) and (math.isnan(value) or name not in UNBOUNDED):
            default = "null" if field.default is None else field.default
            yield f"{name}={value} is not a finite number; set {name}={default}"


def _intervals(config: Config) -> Iterator[str]:
    """Settings that lie between two bounds, both included."""
    inf = math.inf
    intervals = {
        "seed": (config.seed, 0, 2**32 - 1, 0),  # what numpy, torch and the engine all take
        "model.lora.rank": (config.model.lora.rank, 0, inf, 0),
        "data.max_prompt_tokens": (config.data.max_prompt_tokens, 1, inf, "null"),
        "data.curriculum.rest_epochs": (config.data.curriculum.rest_epochs, 0, inf, 0),
        "data.curriculum.min_pass_rate": (config.data.curriculum.min_pass_rate, 0, 1, 0.0),
        "data.curriculum.max_pass_rate": (config.data.curriculum.max_pass_rate, 0, 1, 1.0),
        "eval.prompts": (config.eval.prompts, 1, inf, "null"),
        "eval.top_p": (config.eval.top_p, 0, 1, 1.0),
        "eval.top_k": (config.eval.top_k, 0, inf, 0),
        "eval.min_p": (config.eval.min_p, 0, 1, 0.0),
        "eval.max_tokens_per_turn": (config.eval.max_tokens_per_turn, 1, inf, "null"),
        "rollout.engine_restarts": (config.rollout.engine_restarts, 0, inf, 2),
        "rollout.top_p": (config.rollout.top_p, 0, 1, 1.0),
        "rollout.top_k": (config.rollout.top_k, 0, inf, 0),
        "rollout.min_p": (config.rollout.min_p, 0, 1, 0.0),
        "algorithm.max_completion_tokens": (config.algorithm.max_completion_tokens, 1, inf, "null"),
        "algorithm.kl_horizon": (config.algorithm.kl_horizon, 1, inf, 10000),
        "optimizer.spike_factor": (config.optimizer.spike_factor, 1, inf, 10.0),
        "optimizer.spike_window": (config.optimizer.spike_window, MIN_NORMS, inf, 64),
        "sync.canary_share": (config.sync.canary_share, 0, 1, 0.01),
        "logger.print_rollouts": (config.logger.print_rollouts, 0, inf, 0),
        "logger.print_rollouts_every": (config.logger.print_rollouts_every, 0, inf, 0),
        "logger.wandb_media_every": (config.logger.wandb_media_every, 0, inf, 0),
        "logger.wandb_rollouts": (config.logger.wandb_rollouts, 0, inf, 0),
    }
    yield from _outside(intervals)


def _outside(intervals: Mapping[str, tuple[float | None, float, float, Any]]) -> Iterator[str]:
    for name, (value, low, high, default) in intervals.items():
        if value is not None and not low <= value <= high:
            bounds = f"at least {low}" if high == math.inf else f"between {low} and {high}"
            yield f"{name}={value} must be {bounds}; set {name}={default}"


def _ranges(config: Config) -> Iterator[str]:
    at_least_one = {
        "updates": config.updates,
        "token_budget": config.token_budget,
        "environment.max_turns": config.environment.max_turns,
        "rollout.prompts_per_step": config.rollout.prompts_per_step,
        "rollout.samples_per_prompt": config.rollout.samples_per_prompt,
        "rollout.max_tokens_per_turn": config.rollout.max_tokens_per_turn,
        "rollout.max_num_seqs": config.rollout.max_num_seqs,
        "profile_steps": config.profile_steps,
        "algorithm.epochs": config.algorithm.epochs,
        "algorithm.minibatches": config.algorithm.minibatches,
        "checkpoint.keep": config.checkpoint.keep,
        "optimizer.max_skipped_updates": config.optimizer.max_skipped_updates,
        "reward.workers": config.reward.workers,
        "rollout.num_engines": config.rollout.num_engines,
        "reward.error_window": config.reward.error_window,
        "eval.samples_per_prompt": config.eval.samples_per_prompt,
    }
    for name, value in at_least_one.items():
        if value < 1:
            yield f"{name}={value} must be at least 1; set {name}=1"
    positive = {
        "rollout.kv_cache_gib": config.rollout.kv_cache_gib,
        "rollout.request_timeout_s": config.rollout.request_timeout_s,
        "rollout.start_timeout_s": config.rollout.start_timeout_s,
        "rollout.silence_timeout_s": config.rollout.silence_timeout_s,
        "sync.bucket_mib": config.sync.bucket_mib,
        "logger.peak_tflops": config.logger.peak_tflops,
        "sync.timeout_s": config.sync.timeout_s,
        "sync.canary_threshold": config.sync.canary_threshold,
        "reward.timeout_s": config.reward.timeout_s,
        "correction.alarm_k3": config.correction.alarm_k3,
        "algorithm.tau_positive": config.algorithm.tau_positive,
        "algorithm.tau_negative": config.algorithm.tau_negative,
        "gateway.max_request_mib": config.gateway.max_request_mib,
    }
    yield from _not_positive(positive)
    not_negative = {
        "algorithm.advantage_eps": config.algorithm.advantage_eps,
        "algorithm.entropy_coef": config.algorithm.entropy_coef,
        "algorithm.kl_coef": config.algorithm.kl_coef,
        "algorithm.max_refills": config.algorithm.max_refills,
        "algorithm.overlong_penalty": config.algorithm.overlong_penalty,
        "correction.kl_penalty": config.correction.kl_penalty,
        "correction.noise_floor_every": config.correction.noise_floor_every,
        "checkpoint.every": config.checkpoint.every,
        "reward.memory_gib": config.reward.memory_gib,
        "max_hours": config.max_hours,
        "step_timeout_s": config.step_timeout_s,
        "eval.every": config.eval.every,
        "eval.temperature": config.eval.temperature,
    }
    yield from _negative(not_negative)
    if not 1 <= config.server.port <= 65535:
        yield f"server.port={config.server.port} is not a port; set server.port=8000"
    if not 0 <= config.gateway.port <= 65535:
        yield f"gateway.port={config.gateway.port} is not a port; set gateway.port=0 for any that is free"
    if not 0 <= config.correction.low < config.correction.high:
        yield (
            f"correction.low={config.correction.low} and correction.high={config.correction.high} must satisfy "
            "0 <= low < high; set correction.low=0.5 correction.high=2.0"
        )
    if not 0 <= config.reward.max_error_rate <= 1:
        yield f"reward.max_error_rate={config.reward.max_error_rate} is a share; set reward.max_error_rate=0.5"


def _not_positive(values: Mapping[str, float | None]) -> Iterator[str]:
    for name, value in values.items():
        if value is not None and not value > 0:
            default = operator.attrgetter(name)(Config())
            yield f"{name}={value} must be greater than 0; set {name}={'null' if default is None else default}"


def _negative(values: Mapping[str, float]) -> Iterator[str]:
    for name, value in values.items():
        if value < 0:
            yield f"{name}={value} must not be negative; set {name}=0 to switch it off"
