"""Settings that contradict each other, files that are not there: found in milliseconds, with the override that helps.

Nothing heavy is imported here. Every problem is one sentence; all of them are reported at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import operator
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rewards.functions import FUNCTIONS
from rewards.outcomes import ERRORS
from rewards.resolve import MODEL
from rollout.environments import ENVIRONMENTS, make_environment
from rollout.errors import ConfigError
from trainer.config import Config

GROUP_ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline", "grpo_passk")
"""Advantages that compare a rollout with the others of its group."""
MAX_SUPPORT = 20
"""rollout.embedded.MAX_SUPPORT, which cannot be imported before torch may be; a test holds them equal."""
UNBOUNDED = ("correction.high", "correction.alarm_kl", "correction.alarm_k3", "algorithm.clip_high")
"""Settings that infinity switches off."""
DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")


def validate(config: Config, *, needs_data: bool = True) -> None:
    """Raise `ConfigError` with one line per problem, or return. needs_data: whether the data files must be there."""
    problems = [*_choices("", config), *_not_finite("", config), *_ranges(config), *_intervals(config)]
    problems += [*_batch(config), *_algorithm(config), *_ppo(config), *_sampling(config), *_model(config)]
    if needs_data:
        problems += _files(config)
    if not problems:  # asked last, because an environment may load the user's files
        problems += [*_rewards(config), *_environment(config)]
    if problems:
        raise ConfigError("\n".join(problems))


def closest(word: str, words: list[str] | tuple[str, ...]) -> str:
    """' (did you mean x?)' or nothing."""
    match = difflib.get_close_matches(word, words, n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""


def _choices(prefix: str, node: Any) -> Iterator[str]:
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        name = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from _choices(f"{name}.", value)
        choices = field.metadata.get("choices")
        if choices and value not in choices:
            hint = closest(str(value), choices)
            yield f"{name}={value} is not one of {', '.join(choices)}{hint}; set {name}={choices[0]}"


def _not_finite(prefix: str, node: Any) -> Iterator[str]:
    """NaN passes every comparison below, and infinity most; both would be found by the first update, in its loss."""
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        name = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from _not_finite(f"{name}.", value)
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
        "rollout.top_p": (config.rollout.top_p, 0, 1, 1.0),
        "rollout.top_k": (config.rollout.top_k, 0, inf, 0),
        "rollout.min_p": (config.rollout.min_p, 0, 1, 0.0),
        "algorithm.max_completion_tokens": (config.algorithm.max_completion_tokens, 1, inf, "null"),
        "algorithm.kl_horizon": (config.algorithm.kl_horizon, 1, inf, 10000),
        "optimizer.momentum": (config.optimizer.momentum, 0, 1, 0.95),
        "optimizer.final_lr_fraction": (config.optimizer.final_lr_fraction, 0, 1, 0.0),
        "logger.print_rollouts": (config.logger.print_rollouts, 0, inf, 0),
        "logger.print_rollouts_every": (config.logger.print_rollouts_every, 0, inf, 0),
    }
    for name, (value, low, high, default) in intervals.items():
        if value is not None and not low <= value <= high:
            bounds = f"at least {low}" if high == inf else f"between {low} and {high}"
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
        "algorithm.epochs": config.algorithm.epochs,
        "algorithm.minibatches": config.algorithm.minibatches,
        "checkpoint.keep": config.checkpoint.keep,
        "reward.workers": config.reward.workers,
        "reward.error_window": config.reward.error_window,
        "eval.prompts": config.eval.prompts,
        "eval.samples_per_prompt": config.eval.samples_per_prompt,
    }
    for name, value in at_least_one.items():
        if value < 1:
            yield f"{name}={value} must be at least 1; set {name}=1"
    positive = {
        "optimizer.lr": config.optimizer.lr,
        "optimizer.eps": config.optimizer.eps,
        "rollout.kv_cache_gib": config.rollout.kv_cache_gib,
        "rollout.request_timeout_s": config.rollout.request_timeout_s,
        "rollout.start_timeout_s": config.rollout.start_timeout_s,
        "sync.bucket_mib": config.sync.bucket_mib,
        "sync.timeout_s": config.sync.timeout_s,
        "reward.timeout_s": config.reward.timeout_s,
        "correction.alarm_k3": config.correction.alarm_k3,
        "algorithm.tau_positive": config.algorithm.tau_positive,
        "algorithm.tau_negative": config.algorithm.tau_negative,
        "gateway.max_request_mib": config.gateway.max_request_mib,
    }
    for name, value in positive.items():
        if not value > 0:
            yield f"{name}={value} must be greater than 0; set {name}={operator.attrgetter(name)(Config())}"
    not_negative = {
        "algorithm.advantage_eps": config.algorithm.advantage_eps,
        "algorithm.entropy_coef": config.algorithm.entropy_coef,
        "algorithm.kl_coef": config.algorithm.kl_coef,
        "algorithm.max_refills": config.algorithm.max_refills,
        "algorithm.overlong_penalty": config.algorithm.overlong_penalty,
        "correction.kl_penalty": config.correction.kl_penalty,
        "correction.noise_floor_every": config.correction.noise_floor_every,
        "optimizer.weight_decay": config.optimizer.weight_decay,
        "optimizer.max_grad_norm": config.optimizer.max_grad_norm,
        "optimizer.warmup_updates": config.optimizer.warmup_updates,
        "checkpoint.every": config.checkpoint.every,
        "reward.memory_gib": config.reward.memory_gib,
        "max_hours": config.max_hours,
        "step_timeout_s": config.step_timeout_s,
        "eval.every": config.eval.every,
        "eval.temperature": config.eval.temperature,
    }
    for name, value in not_negative.items():
        if value < 0:
            yield f"{name}={value} must not be negative; set {name}=0 to switch it off"
    if not 0 <= config.gateway.port <= 65535:
        yield f"gateway.port={config.gateway.port} is not a port; set gateway.port=0 for any that is free"
    if len(config.optimizer.betas) != 2 or not all(0 <= beta < 1 for beta in config.optimizer.betas):
        yield f"optimizer.betas={config.optimizer.betas} must be two numbers in [0, 1); set optimizer.betas=[0.9,0.95]"
    if not 0 <= config.correction.low < config.correction.high:
        yield (
            f"correction.low={config.correction.low} and correction.high={config.correction.high} must satisfy "
            "0 <= low < high; set correction.low=0.5 correction.high=2.0"
        )
    if not 0 <= config.reward.max_error_rate <= 1:
        yield f"reward.max_error_rate={config.reward.max_error_rate} is a share; set reward.max_error_rate=0.5"
    for outcome, policy in config.reward.on_error.items():
        if outcome not in ERRORS:
            hint = closest(str(outcome), [*ERRORS])
            yield (
                f"reward.on_error: {outcome} is not one of {', '.join(ERRORS)}{hint}; "
                "set 'reward.on_error={timeout: drop}'"
            )
        is_number = isinstance(policy, int | float) and not isinstance(policy, bool) and math.isfinite(policy)
        if policy not in ("drop", "raise") and not is_number:
            yield (
                f"reward.on_error.{outcome}={policy} is neither drop, raise nor a number; "
                f"set 'reward.on_error={{{outcome}: drop}}'"
            )
    if not config.reward.functions:
        yield "reward.functions is empty, so every reward would be 0; set reward.functions=[exact_match]"
    if config.reward.weights is not None and len(config.reward.weights) != len(config.reward.functions):
        yield (
            f"reward.weights={config.reward.weights} has {len(config.reward.weights)} entries for "
            f"{len(config.reward.functions)} reward.functions; set reward.weights=null, or one weight per function"
        )


def _batch(config: Config) -> Iterator[str]:
    rollout, algorithm = config.rollout, config.algorithm
    if rollout.samples_per_prompt == 1 and algorithm.advantage in GROUP_ADVANTAGES:
        yield (
            f"rollout.samples_per_prompt=1 gives groups of one, whose {algorithm.advantage} advantage is always 0; "
            "set rollout.samples_per_prompt=8, or algorithm.advantage=reinforce_plus_plus"
        )
    batch = rollout.prompts_per_step * rollout.samples_per_prompt
    if algorithm.minibatches >= 1 and batch % algorithm.minibatches:
        fitting = [n for n in range(1, batch + 1) if batch % n == 0]
        nearest = min(fitting, key=lambda n: (abs(n - algorithm.minibatches), n))
        yield (
            f"algorithm.minibatches={algorithm.minibatches} does not divide the {batch} rollouts of a step "
            f"(rollout.prompts_per_step x rollout.samples_per_prompt); set algorithm.minibatches={nearest}"
        )
    if config.correction.logp_old == "bypass" and algorithm.epochs * algorithm.minibatches > 1:
        yield (
            "correction.logp_old=bypass needs one update per rollout batch, but algorithm.epochs x "
            f"algorithm.minibatches = {algorithm.epochs * algorithm.minibatches}; set correction.logp_old=recompute"
        )


def _ppo(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    for name, value in (("gamma", algorithm.gamma), ("gae_lambda", algorithm.gae_lambda)):
        if not 0 <= value <= 1:
            yield f"algorithm.{name}={value} must lie between 0 and 1; set algorithm.{name}=1.0"
    if algorithm.value_clip is not None and not algorithm.value_clip > 0:
        yield f"algorithm.value_clip={algorithm.value_clip} must be greater than 0; set algorithm.value_clip=null"
    if algorithm.value_coef < 0:
        yield f"algorithm.value_coef={algorithm.value_coef} must not be negative; set algorithm.value_coef=0.5"
    critic_lr = config.optimizer.critic_lr
    if critic_lr is not None and (not critic_lr > 0 or config.optimizer.name in ("adamw_8bit", "muon")):
        yield (
            f"optimizer.critic_lr={critic_lr} with optimizer.name={config.optimizer.name}: it must be greater than 0, "
            "and is for adamw, adamw_tf and sgd; set optimizer.critic_lr=null"
        )
    batch = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    if algorithm.kl_target is not None:
        if algorithm.advantage != "gae" or algorithm.kl_place != "reward" or not algorithm.kl_coef > 0:
            yield (
                f"algorithm.kl_target={algorithm.kl_target} adapts the KL penalty in PPO's reward, but "
                f"algorithm.advantage={algorithm.advantage}, algorithm.kl_place={algorithm.kl_place} and "
                f"algorithm.kl_coef={algorithm.kl_coef}; set algorithm.advantage=gae algorithm.kl_place=reward "
                "algorithm.kl_coef=0.15, or algorithm.kl_target=null"
            )
        if not algorithm.kl_target > 0:
            yield f"algorithm.kl_target={algorithm.kl_target} must be greater than 0; set algorithm.kl_target=6"
        if batch >= 5 * algorithm.kl_horizon:
            yield (
                f"algorithm.kl_horizon={algorithm.kl_horizon} with {batch} rollouts per step can turn the sign of the "
                "KL coefficient (a batch must be below 5 horizons); "
                f"set algorithm.kl_horizon={max(10 * batch, 10000)}"
            )
    if algorithm.advantage == "gae" and algorithm.turn_rewards:
        yield (
            "algorithm.turn_rewards=true is for advantages without a critic; algorithm.advantage=gae takes the score "
            "at the end of the rollout: set algorithm.turn_rewards=false"
        )
    if algorithm.advantage == "gae" and config.correction.kl_penalty:
        yield (
            f"correction.kl_penalty={config.correction.kl_penalty} changes the advantage of a rollout, which "
            "algorithm.advantage=gae does not have; set correction.kl_penalty=0"
        )
    if config.rollout.ignore_eos and config.environment.max_turns != 1:
        yield (
            f"rollout.ignore_eos=true samples past the end of a turn, which with environment.max_turns="
            f"{config.environment.max_turns} leaves no turns to tell apart; set environment.max_turns=1"
        )


def _algorithm(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    low = algorithm.clip_low
    if low is None and algorithm.loss != "cispo":
        yield (
            f"algorithm.clip_low=null is for algorithm.loss=cispo, found algorithm.loss={algorithm.loss}; "
            "set algorithm.clip_low=0.2"
        )
    if low is not None and not 0 < low < 1:
        yield f"algorithm.clip_low={low} must lie between 0 and 1; set algorithm.clip_low=0.2"
    if algorithm.importance_sampling_level == "sequence" and algorithm.loss not in (
        "clipped_tis",
        "gspo",
    ):
        yield (
            f"algorithm.importance_sampling_level=sequence has no meaning for algorithm.loss={algorithm.loss}; "
            "set algorithm.loss=gspo (clipped) or algorithm.loss=clipped_tis"
        )
    if not algorithm.clip_high > 0:
        yield f"algorithm.clip_high={algorithm.clip_high} must be greater than 0; set algorithm.clip_high=0.28"
    if algorithm.dual_clip is not None and algorithm.dual_clip <= 1:
        yield f"algorithm.dual_clip={algorithm.dual_clip} must be greater than 1; set algorithm.dual_clip=3"
    if algorithm.dynamic_sampling and config.rollout.samples_per_prompt == 1:
        yield (
            "algorithm.dynamic_sampling=true keeps groups whose rewards differ, and with rollout.samples_per_prompt=1 "
            "there are none; set rollout.samples_per_prompt=8 or algorithm.dynamic_sampling=false"
        )
    if algorithm.turn_rewards and algorithm.advantage in ("remax", "grpo_passk"):
        yield (
            f"algorithm.turn_rewards=true compares turns within a group, algorithm.advantage={algorithm.advantage} "
            "whole rollouts; set algorithm.advantage=grpo or algorithm.turn_rewards=false"
        )
    if not 0 <= algorithm.turn_discount <= 1:
        yield f"algorithm.turn_discount={algorithm.turn_discount} must lie in [0, 1]; set algorithm.turn_discount=1.0"
    if not 0 <= algorithm.overlong_buffer <= 1:
        yield (
            f"algorithm.overlong_buffer={algorithm.overlong_buffer} is a share of the horizon of {config.horizon} "
            "tokens, between 0 (off) and 1; set algorithm.overlong_buffer=0.2"
        )
    if config.model.reference_path is not None and not algorithm.kl_coef:
        yield (
            f"model.reference_path={config.model.reference_path} is not used while algorithm.kl_coef=0; "
            "set algorithm.kl_coef=0.01 or model.reference_path=null"
        )
    if config.correction.kl_penalty and config.correction.logp_old == "bypass":
        yield (
            f"correction.kl_penalty={config.correction.kl_penalty} compares the engine's logprobs with the trainer's, "
            "which correction.logp_old=bypass does not compute; set correction.logp_old=recompute"
        )


def _sampling(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if rollout.temperature <= 0:
        yield (
            f"rollout.temperature={rollout.temperature}: a greedy sample has no distribution to train against; "
            "set rollout.temperature=1.0 (eval.temperature=0 is fine)"
        )
    truncations = (("top_p", rollout.top_p, 1.0), ("top_k", rollout.top_k, 0), ("min_p", rollout.min_p, 0.0))
    truncating = [(name, value, full) for name, value, full in truncations if value != full]
    replayable = 1 <= rollout.top_k <= MAX_SUPPORT
    for name, value, full in truncating if not rollout.replay_support else ():
        replay = "rollout.replay_support=true" + ("" if replayable else f" rollout.top_k={MAX_SUPPORT}")
        yield (
            f"rollout.{name}={value} truncates the sampling distribution, so the engine's logprobs are over another "
            "support than the trainer's and every importance ratio is biased; "
            f"set rollout.{name}={full}, or {replay} to train on the engine's support"
        )
    if rollout.replay_support and truncating and not replayable:
        yield (
            f"rollout.replay_support=true needs rollout.top_k in 1 .. {MAX_SUPPORT}, found {rollout.top_k}: the engine "
            f"returns the logprobs of that many tokens, and only under top_k they are the whole support; "
            f"set rollout.top_k={MAX_SUPPORT}"
        )
    if rollout.replay_support and not truncating:
        yield (
            "rollout.replay_support=true has nothing to replay: rollout.top_p=1.0, top_k=0 and min_p=0.0 sample from "
            f"the whole vocabulary; set rollout.top_k={MAX_SUPPORT} or rollout.replay_support=false"
        )
    if rollout.max_tokens_per_turn >= rollout.max_model_len:
        yield (
            f"rollout.max_tokens_per_turn={rollout.max_tokens_per_turn} leaves no room for a prompt in "
            f"rollout.max_model_len={rollout.max_model_len}; "
            f"set rollout.max_model_len={4 * rollout.max_tokens_per_turn}"
        )


def _model(config: Config) -> Iterator[str]:
    reference = config.model.reference_path
    if reference is not None and _is_local(reference) and not (Path(reference).expanduser() / "config.json").is_file():
        yield (
            f"model.reference_path={reference} has no config.json; point it at a directory that `save_pretrained` "
            "wrote, or set model.reference_path=null for model.path"
        )
    if _is_local(config.model.path) and not (Path(config.model.path).expanduser() / "config.json").is_file():
        task = Path(config.model.path).name
        make = (
            f"run `python scripts/make_demo_model.py --task {task}`"
            if task in ("calculator", "chain", "reverse")
            else "point it at a directory that `save_pretrained` wrote"
        )
        yield f"model.path={config.model.path} has no config.json; {make}, or set model.path=<directory or hub id>"


def _rewards(config: Config) -> Iterator[str]:
    """Names of reward functions; what a user's own file holds is seen when it is loaded."""
    names = [*FUNCTIONS, MODEL]
    for spec in config.reward.functions:
        path, colon, _ = spec.rpartition(":")
        if colon and not Path(path).is_file():
            yield f"reward.functions: no file {path} (looked in {Path.cwd()}); expected path/to/file.py:function"
        if not colon and spec not in names:
            yield (
                f"reward.functions: {spec} is not one of {', '.join(names)}{closest(spec, names)}; set "
                "reward.functions=[exact_match], or reward.functions=[path/to/file.py:function]"
            )


def _environment(config: Config) -> Iterator[str]:
    """The environment's name, and settings that it refuses itself."""
    name = config.environment.name
    if ":" not in name and name not in ENVIRONMENTS:
        yield (
            f"environment.name={name} is not one of {', '.join(ENVIRONMENTS)}{closest(name, list(ENVIRONMENTS))}; set "
            "environment.name=single_turn, or environment.name=path/to/file.py:ClassName"
        )
        return
    try:
        make_environment(name, **config.environment.settings)
    except ConfigError as error:
        yield str(error)


def _files(config: Config) -> Iterator[str]:
    paths = {"data.path": config.data.path}
    if config.eval.every and config.data.heldout_path is None:
        yield (
            f"eval.every={config.eval.every} needs held-out data; "
            "set data.heldout_path=<file or hub id>, or eval.every=0"
        )
    if config.data.heldout_path is not None:
        paths["data.heldout_path"] = config.data.heldout_path
    for name, path in paths.items():
        if Path(path).suffix in DATA_SUFFIXES and not Path(path).expanduser().is_file():
            yield f"{name}={path} does not exist (looked in {Path.cwd()}); set {name}=<file or hub id>"
    if config.resume not in ("never", "auto") and not Path(config.resume).is_dir():
        yield f"resume={config.resume} is neither never, auto nor a checkpoint directory; set resume=auto"
    if config.resume == "auto" and config.run_name is None:
        yield "resume=auto does not know which run to continue; set run_name=<name of the directory under runs/>"
    if config.run_name is not None and (os.sep in config.run_name or config.run_name in (".", "..", "latest")):
        yield f"run_name={config.run_name} must be a plain directory name; set run_name=my-run"


def _is_local(path: str) -> bool:
    """Whether a model path can only mean a directory: hub ids look like 'name' or 'organisation/name'."""
    return path.startswith(("/", ".", "~", "models/")) or Path(path).exists()
