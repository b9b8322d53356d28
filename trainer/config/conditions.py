"""Conditions under which settings have an effect, each with overrides that fulfill it."""

from __future__ import annotations

from lockstep.rollout.system.user_functions import names_function
from lockstep.trainer.objective.correction.modes import CORRECTION_MODES
from lockstep.trainer.objective.own.lookup import advantage_named
from lockstep.trainer.setting import When

LORA = When(instead="model.lora.rank=16", holds=lambda c: c.model.lora.rank > 0)
IMAGES = When(instead="model.images.max_per_prompt=1", holds=lambda c: c.model.sees_images)
CRITIC = When(instead="algorithm=ppo", holds=lambda c: c.plan.has_critic, because=("algorithm.advantage",))
CURRICULUM = When(instead="data.curriculum.rest_epochs=1", holds=lambda c: c.data.curriculum.is_on)
LEARNABILITY = When(
    instead="data.curriculum.weighting=learnability", holds=lambda c: c.data.curriculum.weighting == "learnability"
)
POOLS = When(instead="data.curriculum.weighting=pools", holds=lambda c: c.data.curriculum.weighting == "pools")
WEIGHTS = When(
    instead="correction.mode=token_truncate", holds=lambda c: CORRECTION_MODES[c.correction.mode].control is not None
)
MEASURED = When(instead="correction=off", holds=lambda c: c.correction.mode != "none", because=("correction.mode",))
SPIKES = When(instead="optimizer.spike=skip", holds=lambda c: c.optimizer.spike != "off")
MOMENTUM = When(
    instead="optimizer=muon", holds=lambda c: c.optimizer.name in ("muon", "sgd"), because=("optimizer.name",)
)
STEP_LIMIT = When(instead="step_timeout_s=1800", holds=lambda c: c.step_timeout_s > 0)
EMBEDDED = When(instead="rollout=embedded", holds=lambda c: c.rollout.engine == "embedded", because=("rollout.engine",))
OWN_ENGINES = When(
    instead="rollout=embedded", holds=lambda c: c.rollout.engine != "server", because=("rollout.engine",)
)
SERVERS = When(
    instead="rollout=server",
    holds=lambda c: c.rollout.engine == "server" or bool(c.teacher.urls),
    because=("rollout.engine", "teacher.urls"),
)
COLOCATED = When(
    instead="rollout=colocated", holds=lambda c: c.rollout.engine == "colocated", because=("rollout.engine",)
)
AHEAD = When(instead="rollout.max_staleness=1", holds=lambda c: c.rollout.max_staleness > 0)
WANDB = When(instead="logger=wandb", holds=lambda c: c.logger.wandb != "off", because=("logger.wandb",))
PROJECTS = When(
    instead="logger=wandb",
    holds=lambda c: c.logger.wandb != "off" or c.logger.mlflow or c.logger.trackio or c.logger.swanlab,
    because=("logger.wandb",),
)
ROLLOUTS = When(instead="algorithm=grpo", holds=lambda c: c.has_rollouts, because=("algorithm.trains_on",))
LEARNS_FROM_TEACHER = When(
    instead="demonstrations.teacher_divergence=forward",
    holds=lambda c: c.has_rollouts or c.demonstrations.teacher_divergence != "off",
    because=("algorithm.trains_on", "demonstrations.teacher_divergence"),
)
DEMONSTRATED = When(instead="demonstrations.path=conversations.jsonl", holds=lambda c: bool(c.demonstration_sets()))
SAVED = When(
    instead="demonstrations.path=rollouts:runs/teacher",
    holds=lambda c: any(one.is_saved for one in c.demonstration_sets().values()),
    because=("demonstrations.path",),
)
TAUGHT_DEMONSTRATIONS = When(
    instead="demonstrations.path=conversations.jsonl demonstrations.teacher_divergence=forward",
    holds=lambda c: c.demonstrations.teacher_divergence != "off",
    because=("demonstrations.teacher_divergence",),
)
MIXED = When(
    instead="demonstrations.path=conversations.jsonl",
    holds=lambda c: c.has_rollouts and c.demonstrations.path is not None,
    because=("demonstrations.path", "algorithm.trains_on"),
)
MIXED_SCHEDULE = When(
    instead="demonstrations.path=conversations.jsonl demonstrations.weight_schedule=linear",
    holds=lambda c: MIXED.holds(c) and c.demonstrations.weight_schedule != "constant",
    because=("demonstrations.weight_schedule",),
)
ADAPTED_KL = When(
    instead="algorithm.advantage=gae algorithm.kl_place=reward algorithm.kl_coef=0.15",
    holds=lambda c: c.plan.has_critic and c.algorithm.kl_place == "reward" and c.algorithm.kl_coef > 0,
)
TRACKED_KL = When(instead="algorithm.kl_target=6", holds=lambda c: c.algorithm.kl_target is not None)
ENTROPY_TARGET = When(instead="algorithm.entropy_target=0.2", holds=lambda c: c.algorithm.entropy_target is not None)
KL_PLACED = When(
    instead="algorithm.kl_coef=0.05",
    holds=lambda c: c.algorithm.kl_coef > 0 or advantage_named(c.algorithm.advantage).kl_in_reward,
)
KL_IN_LOSS = When(
    instead="algorithm.kl_coef=0.05 algorithm.kl_place=loss",
    holds=lambda c: c.algorithm.kl_coef > 0 and c.algorithm.kl_place == "loss",
)
TAUGHT = When(instead="teacher.source=policy", holds=lambda c: c.has_teacher)
WITH_CONTEXT = When(
    instead="""teacher.source=policy teacher.context="'{solution}'\"""",
    holds=lambda c: c.has_teacher and c.teacher.context is not None,
)
TEACHER = When(instead="teacher.path=models/teacher", holds=lambda c: c.teacher.path is not None)
TEACHER_SERVERS = When(instead="teacher.urls=[http://127.0.0.1:8000]", holds=lambda c: bool(c.teacher.urls))
AVERAGED = When(instead="teacher.source=average", holds=lambda c: c.teacher.source == "average")
TEACHER_ENGINE = When(
    instead="teacher.path=models/teacher teacher.urls=[]",
    holds=lambda c: (c.teacher.path is not None and not c.teacher.urls) or AVERAGED.holds(c),
)
DIVERGENCE = When(
    instead="algorithm.teacher_divergence=reverse", holds=lambda c: c.algorithm.teacher_divergence != "off"
)
ANY_DIVERGENCE = When(instead="algorithm.teacher_divergence=reverse", holds=lambda c: bool(c.plan.divergences))
MIXTURE = When(instead="algorithm.teacher_divergence=jsd", holds=lambda c: "jsd" in c.plan.divergences)
REFERENCE = When(instead="algorithm.kl_coef=0.01", holds=lambda c: c.algorithm.kl_coef > 0)
OWN_LOSS = When(instead="algorithm.loss=path/to/file.py:function", holds=lambda c: names_function(c.algorithm.loss))
OWN_ADVANTAGE = When(
    instead="algorithm.advantage=path/to/file.py:function", holds=lambda c: names_function(c.algorithm.advantage)
)
TURN_REWARDS = When(
    instead="algorithm.turn_rewards=true", holds=lambda c: c.algorithm.turn_rewards or c.plan.needs_states
)
LENGTH = When(instead="algorithm.length_control=alp", holds=lambda c: c.algorithm.length_control != "off")
OVERLONG = When(instead="algorithm.overlong_buffer=0.2", holds=lambda c: c.algorithm.overlong_buffer > 0)
HORIZON = When(
    instead="algorithm.overlong_buffer=0.2",
    holds=lambda c: (
        c.algorithm.overlong_buffer > 0 or c.algorithm.normalizer == "dr_grpo" or c.algorithm.length_control == "alp"
    ),
    because=("algorithm.overlong_buffer", "algorithm.normalizer", "algorithm.length_control"),
)
REFILLS = When(
    instead="algorithm.dynamic_sampling=true",
    holds=lambda c: c.algorithm.dynamic_sampling or c.rollout.max_staleness > 0,
)
WORKERS = When(
    instead="reward.isolation=process with a function of a file",
    holds=lambda c: c.reward.uses_workers,
    because=("reward.functions", "reward.isolation"),
)
PROFILE = When(instead="profile=true", holds=lambda c: c.profile)
EVALUATE_SCRIPT = When(instead="it for lockstep evaluate", holds=lambda c: False)
SERVED_ADAPTERS = When(
    instead="it for lockstep evaluate or lockstep serve, or model.lora.path to train an adapter further",
    holds=lambda c: False,
)
RESUMED = When(instead="resume=auto", holds=lambda c: c.resume != "never")
HUB = When(instead="hub.repo=<user or organization>/<name>", holds=lambda c: c.hub.repo is not None)
