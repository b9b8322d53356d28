"""Settings of `algorithm`: common ones, and those declared by policy losses and advantages.

Losses and advantages declare their settings (`trainer/objective/declare.py`); these become fields of `AlgorithmConfig`
under the same names.
"""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass, replace
from typing import TYPE_CHECKING, Any

import lockstep.trainer.objective.advantages  # declares the advantages
import lockstep.trainer.objective.losses  # noqa: F401  # declares the losses
from lockstep.rewards.length import RULES
from lockstep.trainer.config.conditions import (
    ADAPTED_KL,
    ANY_DIVERGENCE,
    CRITIC,
    DIVERGENCE,
    ENTROPY_TARGET,
    HORIZON,
    KL_IN_LOSS,
    KL_PLACED,
    LENGTH,
    MIXTURE,
    OVERLONG,
    OWN_ADVANTAGE,
    OWN_LOSS,
    REFILLS,
    ROLLOUTS,
    TRACKED_KL,
    TURN_REWARDS,
)
from lockstep.trainer.objective.declare import ADVANTAGES, POLICY_LOSSES, declared_arguments
from lockstep.trainer.objective.distillation.divergence import DIVERGENCES
from lockstep.trainer.objective.kl import KL_TERMS
from lockstep.trainer.objective.loss_normalization import NORMALIZERS
from lockstep.trainer.setting import When, as_field, setting


@dataclass
class AlgorithmFields:
    """Settings of every algorithm."""

    name: str = setting("grpo", "name of the preset, for logs only")
    trains_on: str = setting(
        "rollouts",
        "rollouts: sampled and rewarded; demonstrations: assistant turns of data.path alone, without an engine "
        "(docs/sft.md)",
        choices=("rollouts", "demonstrations"),
    )
    advantage: str = setting("grpo", "advantage estimator", choices=tuple(ADVANTAGES), or_function=True, when=ROLLOUTS)
    loss: str = setting("ppo_clip", "policy loss per token", choices=tuple(POLICY_LOSSES), or_function=True)
    advantage_settings: dict[str, Any] = setting({}, "keyword arguments of an advantage of yours", when=OWN_ADVANTAGE)
    loss_settings: dict[str, Any] = setting({}, "keyword arguments of a loss of yours", when=OWN_LOSS)
    advantage_sha256: str | None = setting(
        None,
        "SHA-256 that the file of an advantage of yours must have; null: any, recorded by the run",
        when=OWN_ADVANTAGE,
    )
    loss_sha256: str | None = setting(
        None, "SHA-256 that the file of a loss of yours must have; null: any, recorded by the run", when=OWN_LOSS
    )
    normalizer: str = setting("token", "denominator of the loss, counted over all ranks", choices=tuple(NORMALIZERS))
    reward_coef: float = setting(
        1.0,
        "weight of advantages from rewards beside those from the teacher; 0: distillation alone",
        low=0,
        when=ROLLOUTS,
    )
    teacher_coef: float = setting(
        0.0,
        "weight of logp_teacher - logp_old in the advantage of each token (docs/distillation.md)",
        low=0,
        when=ROLLOUTS,
    )
    teacher_divergence: str = setting(
        "off", "loss over the most probable tokens of the teacher", choices=("off", *DIVERGENCES), when=ROLLOUTS
    )
    teacher_divergence_coef: float = setting(1.0, "weight of the divergence in the loss", low=0, when=DIVERGENCE)
    teacher_divergence_top_k: int = setting(
        20,
        "most probable tokens of the teacher at each position; all others count as one",
        low=1,
        high=20,
        when=ANY_DIVERGENCE,
    )
    teacher_divergence_beta: float = setting(
        0.5, "jsd: weight of the teacher in the mixture", above=0, below=1, when=MIXTURE
    )
    turn_rewards: bool = setting(
        False, "credit per turn, from the outcome `turn_rewards` of the environment (docs/algorithms.md)", when=ROLLOUTS
    )
    turn_discount: float = setting(1.0, "discount of rewards per turn", low=0, high=1, when=TURN_REWARDS)
    epochs: int = setting(1, "passes over a rollout batch", low=1, when=ROLLOUTS)
    minibatches: int = setting(
        1, "optimizer steps per pass; must divide prompts_per_step x samples_per_prompt", low=1, when=ROLLOUTS
    )
    value_coef: float = setting(0.5, "weight of the value loss", low=0, when=CRITIC)
    value_clip: float | None = setting(
        0.2, "clip range of values around those before the update [reward]; null: none", above=0, when=CRITIC
    )
    critic_warmup: int = setting(
        0,
        "first updates of the run, in which only the critic is trained (value pretraining) [updates]",
        low=0,
        when=CRITIC,
    )
    entropy_coef: float = setting(
        0.0, "weight of the entropy bonus; with entropy_target the first one", low=0, when=ROLLOUTS
    )
    entropy_target: float | None = setting(
        None,
        "entropy per token below which entropy_coef acts and grows [nats]; null: entropy_coef is fixed",
        above=0,
        when=ROLLOUTS,
    )
    entropy_coef_step: float = setting(
        0.005,
        "growth of entropy_coef per update below entropy_target, and its loss above",
        above=0,
        when=ENTROPY_TARGET,
    )
    entropy_coef_max: float = setting(1.0, "largest adapted entropy_coef", above=0, when=ENTROPY_TARGET)
    router_aux_coef: float | None = setting(
        0.0,
        "mixtures of experts: weight of the load-balancing loss of the routers; null: the model's router_aux_loss_coef",
        low=0,
    )
    router_z_coef: float | None = setting(
        0.0, "mixtures of experts: weight of the z-loss of the routers; null: the model's router_z_loss_coef", low=0
    )
    kl_coef: float = setting(
        0.0, "weight of the KL from the frozen reference; 0: no reference is loaded", low=0, when=ROLLOUTS
    )
    kl_target: float | None = setting(
        None, "KL per rollout to which kl_coef adapts [nats]; null: kl_coef is fixed", above=0, when=ADAPTED_KL
    )
    kl_horizon: int = setting(10000, "rollouts over which kl_coef changes by at most 20 %", low=1, when=TRACKED_KL)
    kl_place: str = setting(
        "loss",
        "loss: a term of the loss; reward: a penalty per token in advantages",
        choices=("loss", "reward"),
        when=KL_PLACED,
    )
    kl_estimator: str = setting(
        "k3", "KL estimate in the loss (trainer/objective/kl.py)", choices=KL_TERMS, when=KL_IN_LOSS
    )
    max_completion_tokens: int | None = setting(
        None,
        "horizon H of dr_grpo, overlong shaping and alp [tokens]; null: environment.max_turns x "
        "rollout.max_tokens_per_turn",
        low=1,
        when=HORIZON,
    )
    overlong_buffer: float = setting(
        0.0,
        "last share of the horizon, in which the reward falls linearly by overlong_penalty; 0: off",
        low=0,
        high=1,
        when=ROLLOUTS,
    )
    overlong_penalty: float = setting(1.0, "reward lost by a rollout of the whole horizon", low=0, when=OVERLONG)
    length_control: str = setting(
        "off",
        "reward for short rollouts, relative to their group (rewards/length.py)",
        choices=("off", *RULES),
        when=ROLLOUTS,
    )
    length_weight: float = setting(0.1, "weight of the reward of length control", low=0, when=LENGTH)
    solved_reward: float = setting(
        1.0, "length control: lowest reward of the functions of a rollout that counts as solved", when=LENGTH
    )
    dynamic_sampling: bool = setting(False, "replace groups whose rewards are all equal by new groups", when=ROLLOUTS)
    max_refills: int = setting(3, "maximum number of replacements of dropped groups per step", low=0, when=REFILLS)


def takes(name: str) -> When:
    """Return the condition that the loss or advantage of the configuration takes a setting."""
    losses = [loss for loss, objective in POLICY_LOSSES.items() if name in objective.arguments]
    advantages = [advantage for advantage, objective in ADVANTAGES.items() if name in objective.arguments]
    kind, names = ("loss", losses) if losses else ("advantage", advantages)
    default = getattr(AlgorithmFields, kind)
    return When(
        instead=f"algorithm.{kind}={default if default in names else names[0]}",
        holds=lambda c: getattr(c.algorithm, kind) in names,
    )


def algorithm_class() -> type[AlgorithmFields]:
    """Return `AlgorithmFields` with a field for every setting that losses and advantages declare."""
    setting_fields = [
        (name, argument.type, as_field(replace(argument.setting, when=takes(name))))
        for name, argument in declared_arguments().items()
    ]
    return make_dataclass("AlgorithmConfig", setting_fields, bases=(AlgorithmFields,))


if TYPE_CHECKING:
    AlgorithmConfig = AlgorithmFields
else:
    AlgorithmConfig = algorithm_class()
