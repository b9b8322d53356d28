"""Conflicts between settings of the algorithm and of sampling."""

from __future__ import annotations

from collections.abc import Iterator

from rollout.engine.protocol import MAX_SUPPORT
from trainer.config.schema import Config
from trainer.objective.declare import ADVANTAGES
from trainer.objective.kl_control import MAX_EPISODES_PER_HORIZON


def algorithm_problems(config: Config) -> Iterator[str]:
    """Yield one sentence per conflict."""
    yield from _batch(config)
    yield from _advantage(config)
    yield from _critic(config)
    yield from _sampling(config)
    if config.share_prefixes == "always" and config.attention != "packed_rows":
        yield (
            f"share_prefixes=always with model.attn_implementation={config.attention}, which cannot let a row attend "
            "to what another one has computed; set model.attn_implementation=packed_rows, or share_prefixes=auto"
        )


def _batch(config: Config) -> Iterator[str]:
    rollout, algorithm = config.rollout, config.algorithm
    if rollout.samples_per_prompt == 1 and ADVANTAGES[algorithm.advantage].compares_group:
        yield (
            f"rollout.samples_per_prompt=1 gives groups of one, whose {algorithm.advantage} advantage is always 0; "
            "set rollout.samples_per_prompt=8, or algorithm.advantage=reinforce_plus_plus"
        )
    if rollout.samples_per_prompt == 1 and algorithm.dynamic_sampling:
        yield (
            "algorithm.dynamic_sampling=true keeps groups whose rewards differ, and groups of one "
            "(rollout.samples_per_prompt=1) have no differences; set rollout.samples_per_prompt=8 or "
            "algorithm.dynamic_sampling=false"
        )
    batch = rollout.prompts_per_step * rollout.samples_per_prompt
    if algorithm.minibatches >= 1 and batch % algorithm.minibatches:
        fitting = [n for n in range(1, batch + 1) if batch % n == 0]
        nearest = min(fitting, key=lambda n: (abs(n - algorithm.minibatches), n))
        yield (
            f"algorithm.minibatches={algorithm.minibatches} does not divide the {batch} rollouts of a step "
            f"(rollout.prompts_per_step x rollout.samples_per_prompt); set algorithm.minibatches={nearest}"
        )
    if algorithm.kl_target is not None and batch >= MAX_EPISODES_PER_HORIZON * algorithm.kl_horizon:
        yield (
            f"algorithm.kl_horizon={algorithm.kl_horizon} with {batch} rollouts per step can turn the sign of the "
            "KL coefficient (a batch must be below 5 horizons); "
            f"set algorithm.kl_horizon={max(10 * batch, 10000)}"
        )


def _advantage(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.turn_rewards and not ADVANTAGES[algorithm.advantage].takes_turns:
        yield (
            f"algorithm.turn_rewards=true compares turns within a group, algorithm.advantage={algorithm.advantage} "
            "whole rollouts; set algorithm.advantage=grpo or algorithm.turn_rewards=false"
        )
    if config.rollout.ignore_eos and config.environment.max_turns != 1:
        yield (
            "rollout.ignore_eos=true samples past the end of a turn, so turns cannot be told apart with "
            f"environment.max_turns={config.environment.max_turns}; set environment.max_turns=1"
        )


def _critic(config: Config) -> Iterator[str]:
    if not config.has_critic:
        return
    algorithm, model, critic_lr = config.algorithm, config.model, config.optimizer.critic_lr
    if algorithm.turn_discount != 1:
        yield (
            f"algorithm.turn_discount={algorithm.turn_discount} is for advantages without a critic; "
            f"algorithm.advantage={algorithm.advantage} discounts per token: set algorithm.turn_discount=1.0 and "
            "algorithm.gamma"
        )
    if config.correction.kl_penalty:
        yield (
            f"correction.kl_penalty={config.correction.kl_penalty} changes the advantage of a rollout, which "
            f"algorithm.advantage={algorithm.advantage} does not have; set correction.kl_penalty=0"
        )
    if critic_lr is not None and config.optimizer.name in ("adamw_8bit", "muon"):
        yield (
            f"optimizer.critic_lr={critic_lr} with optimizer.name={config.optimizer.name}, which has one learning "
            "rate: it is for adamw, adamw_tf and sgd; set optimizer.critic_lr=null"
        )
    if model.critic == "shared" and model.critic_path is not None:
        yield (
            f"model.critic_path={model.critic_path} is the start of a separate critic, and model.critic=shared has "
            "none; set model.critic=separate or model.critic_path=null"
        )


def _sampling(config: Config) -> Iterator[str]:
    rollout = config.rollout
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
