"""Settings that nothing would act on: set away from their default, while the setting that they belong to is off.

Only changes from the defaults of trainer/config/schema.py are refused, so a preset may say a default again. Exempt is
what a preset says for when its user switches the rest on (`algorithm.kl_place` of advantages with the KL in the
reward), and everything that another script reads from the same files (engine and server settings).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rewards.functions.built_in import ISOLATED
from trainer.config.schema import Config

NORMALIZED_BY_STD = ("grpo", "grpo_passk")
"""Advantages that read `advantage_std` and `advantage_ddof`, as trainer/credit/targets.py, which needs torch, has
them."""
WITH_EPS = (*NORMALIZED_BY_STD, "reinforce_plus_plus", "reinforce_plus_plus_baseline")
KL_IN_REWARD = ("gae", "rloo", "remax", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""Advantages whose presets say kl_place=reward, for the day that somebody sets a kl_coef."""
DEFAULTS = Config()


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """What makes settings count."""

    settings: tuple[str, ...]
    counts: Callable[[Config], bool]
    because: tuple[str, ...]
    """Settings that decide it; they are shown with their values."""
    instead: str
    """What to set for the settings to count."""


USES = (
    Use(
        settings=("model.lora.alpha", "model.lora.target_modules"),
        counts=lambda c: c.model.lora.rank > 0,
        because=("model.lora.rank",),
        instead="model.lora.rank=16",
    ),
    Use(
        settings=("on_step_timeout",),
        counts=lambda c: c.step_timeout_s > 0,
        because=("step_timeout_s",),
        instead="step_timeout_s=1800",
    ),
    Use(
        settings=("profile_steps",),
        counts=lambda c: c.profile,
        because=("profile",),
        instead="profile=true",
    ),
    Use(
        settings=("rollout.engine_restarts",),
        counts=lambda c: c.rollout.engine != "server",
        because=("rollout.engine",),
        instead="rollout=embedded",
    ),
    Use(
        settings=("rollout.num_engines",),
        counts=lambda c: c.rollout.engine == "embedded",
        because=("rollout.engine",),
        instead="rollout=embedded",
    ),
    Use(
        settings=("rollout.silence_timeout_s",),
        counts=lambda c: c.rollout.engine == "server",
        because=("rollout.engine",),
        instead="rollout=server",
    ),
    Use(
        settings=("rollout.sleep_level",),
        counts=lambda c: c.rollout.engine == "colocated",
        because=("rollout.engine",),
        instead="rollout=colocated",
    ),
    Use(
        settings=("correction.low", "correction.high"),
        counts=lambda c: c.correction.mode not in ("off", "none"),
        because=("correction.mode",),
        instead="correction.mode=token_truncate",
    ),
    Use(
        settings=tuple(f"correction.{name}" for name in ("noise_floor_every", "alarm_kl", "alarm_ess", "alarm_k3")),
        counts=lambda c: c.correction.mode != "none",
        because=("correction.mode",),
        instead="correction=off",
    ),
    Use(
        settings=("algorithm.kl_place",),
        counts=lambda c: c.algorithm.kl_coef > 0 or c.algorithm.advantage in KL_IN_REWARD,
        because=("algorithm.kl_coef",),
        instead="algorithm.kl_coef=0.05",
    ),
    Use(
        settings=("algorithm.kl_estimator",),
        counts=lambda c: c.algorithm.kl_coef > 0 and c.algorithm.kl_place == "loss",
        because=("algorithm.kl_coef", "algorithm.kl_place"),
        instead="algorithm.kl_coef=0.05 algorithm.kl_place=loss",
    ),
    Use(
        settings=("algorithm.kl_horizon",),
        counts=lambda c: c.algorithm.kl_target is not None,
        because=("algorithm.kl_target",),
        instead="algorithm.kl_target=6",
    ),
    Use(
        settings=tuple(
            f"algorithm.{name}"
            for name in ("gamma", "gae_lambda", "value_coef", "value_clip", "whiten_rewards", "whiten_advantages")
        ),
        counts=lambda c: c.has_critic,
        because=("algorithm.advantage",),
        instead="algorithm=ppo",
    ),
    Use(
        settings=("algorithm.tau_positive", "algorithm.tau_negative"),
        counts=lambda c: c.algorithm.loss == "sapo",
        because=("algorithm.loss",),
        instead="algorithm=sapo",
    ),
    Use(
        settings=("algorithm.advantage_std", "algorithm.advantage_ddof"),
        counts=lambda c: c.algorithm.advantage in NORMALIZED_BY_STD,
        because=("algorithm.advantage",),
        instead="algorithm.advantage=grpo",
    ),
    Use(
        settings=("algorithm.advantage_eps",),
        counts=lambda c: c.algorithm.advantage in WITH_EPS,
        because=("algorithm.advantage",),
        instead="algorithm.advantage=grpo",
    ),
    Use(
        settings=("algorithm.max_refills",),
        counts=lambda c: (
            c.algorithm.dynamic_sampling or c.rollout.max_staleness > 0
        ),  # (trainer/collect/async_source.py)
        because=("algorithm.dynamic_sampling",),
        instead="algorithm.dynamic_sampling=true",
    ),
    Use(
        settings=("algorithm.overlong_penalty",),
        counts=lambda c: c.algorithm.overlong_buffer > 0,
        because=("algorithm.overlong_buffer",),
        instead="algorithm.overlong_buffer=0.2",
    ),
    Use(
        settings=("algorithm.max_completion_tokens",),
        counts=lambda c: c.algorithm.overlong_buffer > 0 or c.algorithm.normalizer == "dr_grpo",
        because=("algorithm.overlong_buffer", "algorithm.normalizer"),
        instead="algorithm.overlong_buffer=0.2",
    ),
    Use(
        settings=("optimizer.spike_factor", "optimizer.spike_window"),
        counts=lambda c: c.optimizer.spike != "off",
        because=("optimizer.spike",),
        instead="optimizer.spike=skip",
    ),
    Use(
        settings=("optimizer.momentum",),
        counts=lambda c: c.optimizer.name in ("muon", "sgd"),
        because=("optimizer.name",),
        instead="optimizer=muon",
    ),
    Use(
        settings=tuple(f"data.curriculum.{name}" for name in ("min_pass_rate", "max_pass_rate", "solved_reward")),
        counts=lambda c: c.data.curriculum.rest_epochs > 0,
        because=("data.curriculum.rest_epochs",),
        instead="data.curriculum.rest_epochs=1",
    ),
    Use(
        settings=("reward.workers", "reward.memory_gib"),
        counts=lambda c: any(_runs_in_a_worker(spec, c) for spec in c.reward.functions),
        because=("reward.functions", "reward.isolation"),
        instead="reward.isolation=process with a function of a file",
    ),
    Use(
        settings=("logger.project", "logger.entity", "logger.group", "logger.wandb_id"),
        counts=lambda c: c.logger.wandb != "off",
        because=("logger.wandb",),
        instead="logger=wandb",
    ),
    Use(
        settings=("hub.private",),
        counts=lambda c: c.hub.repo is not None,
        because=("hub.repo",),
        instead="hub.repo=<user or organisation>/<name>",
    ),
    Use(
        settings=("eval.output", "eval.compare_to"),
        counts=lambda c: False,
        because=(),
        instead="it for scripts/evaluate.py",
    ),
)


def unused_problems(config: Config) -> Iterator[str]:
    """One sentence per setting that this run of scripts/train.py would do nothing with."""
    for use in USES:
        if use.counts(config):
            continue
        for name in use.settings:
            value, default = _value(config, name), _value(DEFAULTS, name)
            if value != default:
                found = " and ".join(f"{other}={_typed(_value(config, other))}" for other in use.because)
                yield (
                    f"{name}={_typed(value)} does nothing {f'with {found}' if found else 'in training'}; set "
                    f"{use.instead}, or {name}={_typed(default)}"
                )


def _runs_in_a_worker(function: str, config: Config) -> bool:
    return function in ISOLATED or (":" in function and config.reward.isolation == "process")


def _value(config: Config, name: str) -> Any:
    return operator.attrgetter(name)(config)


def _typed(value: Any) -> str:
    """As on the command line."""
    if isinstance(value, list):
        return f"[{','.join(map(_typed, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
