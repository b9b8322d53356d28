"""Settings of the algorithm and of sampling that contradict each other, or have no meaning together."""

from __future__ import annotations

from collections.abc import Iterator

from rollout.engine.protocol import MAX_SUPPORT
from trainer.config.schema import Config

GROUP_ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline", "grpo_passk")
"""Advantages that compare a rollout with the others of its group."""


def algorithm_problems(config: Config) -> Iterator[str]:
    """One sentence per contradiction."""
    yield from _batch(config)
    yield from _algorithm(config)
    yield from _ppo(config)
    yield from _sampling(config)
    yield from _sharing(config)


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


def _ppo(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    for name, value in (("gamma", algorithm.gamma), ("gae_lambda", algorithm.gae_lambda)):
        if not 0 <= value <= 1:
            yield f"algorithm.{name}={value} must lie between 0 and 1; set algorithm.{name}=1.0"
    if algorithm.value_clip is not None and not algorithm.value_clip > 0:
        yield f"algorithm.value_clip={algorithm.value_clip} must be greater than 0; set algorithm.value_clip=null"
    if algorithm.value_coef < 0:
        yield f"algorithm.value_coef={algorithm.value_coef} must not be negative; set algorithm.value_coef=0.5"
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
    yield from _critic(config)
    if algorithm.advantage == "gae" and algorithm.turn_discount != 1:
        yield (
            f"algorithm.turn_discount={algorithm.turn_discount} is for advantages without a critic; "
            "algorithm.advantage=gae discounts per token: set algorithm.turn_discount=1.0 and algorithm.gamma"
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


def _critic(config: Config) -> Iterator[str]:
    model, critic_lr = config.model, config.optimizer.critic_lr
    if critic_lr is not None and (not critic_lr > 0 or config.optimizer.name in ("adamw_8bit", "muon")):
        yield (
            f"optimizer.critic_lr={critic_lr} with optimizer.name={config.optimizer.name}: it must be greater than 0, "
            "and is for adamw, adamw_tf and sgd; set optimizer.critic_lr=null"
        )
    if model.critic == "shared" and model.critic_path is not None:
        yield (
            f"model.critic_path={model.critic_path} is what a critic of its own starts from, and model.critic=shared "
            "has none; set model.critic=separate or model.critic_path=null"
        )
    if not config.has_critic:
        unused = {
            "model.critic": (model.critic, "separate"),
            "model.critic_path": (model.critic_path, None),
            "optimizer.critic_lr": (critic_lr, None),
        }
        for name, (value, default) in unused.items():
            if value != default:
                yield (
                    f"{name}={value}, but algorithm.advantage={config.algorithm.advantage} has no critic; "
                    f"set algorithm=ppo, or {name}={'null' if default is None else default}"
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
    if algorithm.dual_clip is not None and algorithm.loss != "ppo_clip":
        yield (
            f"algorithm.dual_clip={algorithm.dual_clip} is for algorithm.loss=ppo_clip, found "
            f"algorithm.loss={algorithm.loss}; set algorithm.dual_clip=null"
        )
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
    if algorithm.turn_discount != 1 and not algorithm.turn_rewards:
        yield (
            f"algorithm.turn_discount={algorithm.turn_discount} discounts rewards of turns, and there are none; "
            "set algorithm.turn_rewards=true or algorithm.turn_discount=1.0"
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


def _sharing(config: Config) -> Iterator[str]:
    if config.share_prefixes == "always" and config.attention != "packed_rows":
        yield (
            f"share_prefixes=always with model.attn_implementation={config.attention}, which cannot let a row attend "
            "to what another one has computed; set model.attn_implementation=packed_rows, or share_prefixes=auto"
        )
