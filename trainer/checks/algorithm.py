"""Conflicts between settings of the algorithm and of sampling."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lockstep.rollout.engine.protocol import MAX_SUPPORT
from lockstep.trainer.checks.names import group_wise_rewards
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.config.groups.correction_settings import CorrectionConfig
from lockstep.trainer.config.groups.model_settings import ModelConfig
from lockstep.trainer.config.groups.optimizer_settings import OptimizerConfig
from lockstep.trainer.config.groups.rollout_settings import RolloutConfig
from lockstep.trainer.config.groups.task_settings import RewardConfig
from lockstep.trainer.config.groups.teacher_settings import TeacherConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.objective.kl_control import MAX_EPISODES_PER_HORIZON
from lockstep.trainer.objective.own.lookup import advantage_named, policy_loss_named


def algorithm_problems(config: Config) -> Iterator[str]:
    """Yield one sentence per conflict."""
    algorithm, rollout = config.algorithm, config.rollout
    yield from _batch(algorithm, rollout)
    yield from _advantage(algorithm, rollout, config.reward)
    if rollout.ignore_eos and config.max_turns != 1:
        yield (
            "rollout.ignore_eos=true samples past the end of a turn and needs one turn per episode, found "
            f"environment.max_turns={config.max_turns}; set environment.max_turns=1"
        )
    yield from _group_rewards(algorithm, rollout, config.reward)
    if config.plan.has_critic:
        yield from _critic(algorithm, config.correction, config.model, config.optimizer)
    yield from _sampling(rollout)
    if not config.has_teacher:
        yield from _missing_teacher(algorithm)
    elif config.teacher.source != "model":
        yield from _self_distillation(config.teacher, reward_coef=algorithm.reward_coef)
    if config.has_teacher and config.plan.teaches_rollouts:
        yield from _distillation(algorithm, rollout, has_critic=config.plan.has_critic)
    elif config.has_teacher and config.demonstrations.teacher_divergence == "off":
        yield (
            f"teacher.path={config.teacher.path} with teacher.source={config.teacher.source} is not used by algorithm="
            f"{algorithm.name}; set algorithm=opd, algorithm.teacher_coef=1 or "
            "algorithm.teacher_divergence=reverse, or teacher.path=null teacher.source=model"
        )
    if config.share_prefixes == "always" and config.model.attention != "packed_rows":
        yield (
            f"share_prefixes=always needs rows that attend to tokens of other rows, found model.attn_implementation="
            f"{config.model.attention}; set model.attn_implementation=packed_rows, or share_prefixes=auto"
        )


def algorithm_warnings(algorithm: AlgorithmConfig, correction: CorrectionConfig) -> Iterator[str]:
    """Yield one sentence per combination that runs, but is another algorithm than its names say."""
    updates = algorithm.epochs * algorithm.minibatches
    if algorithm.loss == "gspo" and algorithm.normalizer == "token":
        yield (
            "algorithm.loss=gspo with algorithm.normalizer=token weights rollouts by their length; GSPO weights them "
            "equally: set algorithm.normalizer=grpo"
        )
    if updates == 1 and algorithm.loss == "kl_cov" and correction.logp_old != "bypass":
        yield (
            "algorithm.loss=kl_cov with one update per rollout batch has log r = 0, so its penalty has no gradient: "
            "set algorithm.minibatches=2, or algorithm=clip_cov"
        )
    if updates > 1 and not policy_loss_named(algorithm.loss).has_ratio:
        yield (
            f"algorithm.loss={algorithm.loss} has no ratio, so {updates - 1} of the {updates} updates of a rollout "
            "batch (algorithm.epochs x algorithm.minibatches) are off policy without a correction: set "
            "algorithm.epochs=1 algorithm.minibatches=1, or algorithm.loss=ppo_clip"
        )


def _batch(algorithm: AlgorithmConfig, rollout: RolloutConfig) -> Iterator[str]:
    compares = algorithm.reward_coef and advantage_named(algorithm.advantage).compares_group
    if rollout.samples_per_prompt == 1 and compares:
        yield (
            f"rollout.samples_per_prompt=1 gives groups of one, whose {algorithm.advantage} advantage is always 0; "
            "set rollout.samples_per_prompt=8, or algorithm.advantage=reinforce_plus_plus"
        )
    if rollout.samples_per_prompt == 1 and algorithm.dynamic_sampling:
        yield (
            "algorithm.dynamic_sampling=true keeps groups whose rewards differ, which a group of one "
            "(rollout.samples_per_prompt=1) never has; set rollout.samples_per_prompt=8 or "
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


def _advantage(algorithm: AlgorithmConfig, rollout: RolloutConfig, reward: RewardConfig) -> Iterator[str]:
    if algorithm.turn_rewards and not advantage_named(algorithm.advantage).takes_turns:
        yield (
            f"algorithm.turn_rewards=true needs an advantage per turn, found algorithm.advantage={algorithm.advantage} "
            "for whole rollouts; set algorithm.advantage=grpo or algorithm.turn_rewards=false"
        )
    of_model = reward.settings.get("model")
    if isinstance(of_model, Mapping) and of_model.get("by_turn") and not algorithm.turn_rewards:
        yield (
            "reward.settings.model.by_turn=true gives one reward per turn, found algorithm.turn_rewards=false; set "
            "algorithm.turn_rewards=true or reward.settings.model.by_turn=false"
        )
    if algorithm.length_control != "off" and rollout.samples_per_prompt == 1:
        yield (
            f"algorithm.length_control={algorithm.length_control} compares rollouts of a group, found "
            "rollout.samples_per_prompt=1; set rollout.samples_per_prompt=8 or algorithm.length_control=off"
        )
    if algorithm.advantage == "maxrl" and (algorithm.overlong_buffer or algorithm.length_control != "off"):
        yield (
            "algorithm.advantage=maxrl needs rewards from 0 on, found a penalty for length (algorithm.overlong_buffer="
            f"{algorithm.overlong_buffer}, algorithm.length_control={algorithm.length_control}); set "
            "algorithm.overlong_buffer=0 algorithm.length_control=off, or algorithm.advantage=grpo"
        )


def _group_rewards(algorithm: AlgorithmConfig, rollout: RolloutConfig, reward: RewardConfig) -> Iterator[str]:
    functions = group_wise_rewards(reward.functions)
    if functions and rollout.samples_per_prompt == 1:
        yield (
            f"reward {functions[0]} compares the rollouts of a group, found rollout.samples_per_prompt=1; set "
            "rollout.samples_per_prompt=8, or another reward, for example reward.functions=[exact_match]"
        )
    if functions and advantage_named(algorithm.advantage).needs_greedy:
        yield (
            f"algorithm.advantage={algorithm.advantage} compares rewards with that of a greedy answer, which is in no "
            f"group, and reward {functions[0]} compares the rollouts of a group; set algorithm.advantage=grpo, or "
            "another reward, for example reward.functions=[exact_match]"
        )


def _critic(
    algorithm: AlgorithmConfig, correction: CorrectionConfig, model: ModelConfig, optimizer: OptimizerConfig
) -> Iterator[str]:
    """Yield settings that do not go with a critic."""
    critic_lr = optimizer.critic_lr
    if algorithm.turn_discount != 1:
        yield (
            f"algorithm.turn_discount={algorithm.turn_discount} is for advantages without a critic, found "
            f"algorithm.advantage={algorithm.advantage}; set algorithm.turn_discount=1.0 and algorithm.gamma, a "
            "discount per token"
        )
    if correction.kl_penalty:
        yield (
            f"correction.kl_penalty={correction.kl_penalty} is for advantages without a critic, found "
            f"algorithm.advantage={algorithm.advantage}; set correction.kl_penalty=0"
        )
    if critic_lr is not None and optimizer.name in ("adamw_8bit", "muon"):
        yield (
            f"optimizer.critic_lr={critic_lr} is for adamw, adamw_tf and sgd, found optimizer.name="
            f"{optimizer.name}; set optimizer.critic_lr=null"
        )
    advantage = advantage_named(algorithm.advantage)
    settings = advantage.values(algorithm) if algorithm.advantage == "gae" else {}
    alpha, lam = settings.get("gae_length_alpha"), settings.get("gae_lambda")
    if alpha is not None and lam != advantage.arguments["gae_lambda"].setting.default:
        yield (
            f"algorithm.gae_lambda={lam} has no effect with algorithm.gae_length_alpha={alpha}, which makes λ by "
            "length; set algorithm.gae_length_alpha=null, or leave algorithm.gae_lambda out"
        )
    if model.critic == "shared" and algorithm.critic_warmup:
        yield (
            f"algorithm.critic_warmup={algorithm.critic_warmup} trains the critic alone, found model.critic=shared, "
            "whose value loss trains the policy's trunk; set model.critic=separate or algorithm.critic_warmup=0"
        )
    if model.critic == "shared" and model.critic_path is not None:
        yield (
            f"model.critic_path={model.critic_path} initializes a separate critic, found model.critic=shared; set "
            "model.critic=separate or model.critic_path=null"
        )


def _missing_teacher(algorithm: AlgorithmConfig) -> Iterator[str]:
    if algorithm.teacher_coef or algorithm.teacher_divergence != "off" or algorithm.reward_coef != 1:
        yield (
            f"algorithm={algorithm.name} learns from a teacher, found teacher.path=null; set teacher.path="
            "<directory or hub id of a model with the policy's tokenizer>, or teacher.source=policy or average"
        )


def _distillation(algorithm: AlgorithmConfig, rollout: RolloutConfig, *, has_critic: bool) -> Iterator[str]:
    """Yield settings that do not go with a teacher of rollouts."""
    if rollout.temperature != 1:
        yield (
            f"rollout.temperature={rollout.temperature} with a teacher: engines score prompts at temperature 1, and "
            "student and teacher are compared at one temperature; set rollout.temperature=1"
        )
    if rollout.replay_support:
        yield (
            "rollout.replay_support=true with a teacher: a student that samples from part of the vocabulary and a "
            "teacher over all of it have no common distribution; set rollout.top_p=1 rollout.top_k=0 rollout.min_p=0 "
            "rollout.replay_support=false"
        )
    if has_critic:
        yield (
            f"algorithm.advantage={algorithm.advantage} trains a critic, which does not learn from a teacher; set "
            "algorithm.advantage=grpo or teacher.path=null teacher.source=model"
        )
    if not algorithm.reward_coef and algorithm.dynamic_sampling:
        yield (
            "algorithm.dynamic_sampling=true keeps groups by their rewards, which algorithm.reward_coef=0 does not "
            "train; set algorithm.dynamic_sampling=false"
        )


def _self_distillation(teacher: TeacherConfig, *, reward_coef: float) -> Iterator[str]:
    if teacher.path is not None:
        yield (
            f"teacher.path={teacher.path} does nothing with teacher.source={teacher.source}, whose teacher is the "
            "policy; set teacher.path=null or teacher.source=model"
        )
    if teacher.source == "average" and teacher.context is None and not reward_coef:
        yield (
            "teacher.source=average with teacher.context=null and algorithm.reward_coef=0 teaches nothing, because the "
            "average begins at the policy and nothing moves either; set teacher.context=<text with {column} of the "
            "data>, or algorithm.reward_coef=1"
        )
    if teacher.source == "average":
        return
    if teacher.context is None:
        yield (
            "teacher.source=policy with teacher.context=null teaches nothing, because teacher and student are one; set "
            "teacher.context=<text with {column} of the data>, for example 'An answer: {answer}'"
        )


def _sampling(rollout: RolloutConfig) -> Iterator[str]:
    truncations = (("top_p", rollout.top_p, 1.0), ("top_k", rollout.top_k, 0), ("min_p", rollout.min_p, 0.0))
    truncating = [(name, value, full) for name, value, full in truncations if value != full]
    replayable = 1 <= rollout.top_k <= MAX_SUPPORT
    for name, value, full in truncating if not rollout.replay_support else ():
        replay = "rollout.replay_support=true" + ("" if replayable else f" rollout.top_k={MAX_SUPPORT}")
        yield (
            f"rollout.{name}={value} truncates the sampling distribution, so logprobs of engine and trainer have "
            "different support and every importance ratio is biased; "
            f"set rollout.{name}={full}, or {replay} to train on the engine's support"
        )
    if rollout.replay_support and truncating and not replayable:
        yield (
            f"rollout.replay_support=true needs rollout.top_k in 1 .. {MAX_SUPPORT}, found {rollout.top_k}: the engine "
            f"returns logprobs of top_k tokens, which must be the whole support; set rollout.top_k={MAX_SUPPORT}"
        )
    if rollout.replay_support and not truncating:
        yield (
            "rollout.replay_support=true is for truncated sampling, found rollout.top_p=1.0, top_k=0 and min_p=0.0; "
            f"set rollout.top_k={MAX_SUPPORT} or rollout.replay_support=false"
        )
    if rollout.max_tokens_per_turn >= rollout.max_model_len:
        yield (
            f"rollout.max_tokens_per_turn={rollout.max_tokens_per_turn} leaves no room for a prompt in "
            f"rollout.max_model_len={rollout.max_model_len}; "
            f"set rollout.max_model_len={4 * rollout.max_tokens_per_turn}"
        )
