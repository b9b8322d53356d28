"""The objectives of a comparison: configurations that differ from that of the run in algorithm and correction."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from omegaconf import OmegaConf

from lockstep.rollout.errors import ConfigError
from lockstep.rollout.system.user_functions import names_function
from lockstep.trainer.checks.validate import validate
from lockstep.trainer.compose import CONFIG_DIR, preset_names
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.config.groups.correction_settings import CorrectionConfig
from lockstep.trainer.config.groups.task_settings import RewardConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.objective.correction.modes import CORRECTION_MODES
from lockstep.trainer.objective.declare import ADVANTAGES, POLICY_LOSSES
from lockstep.trainer.objective.own.lookup import is_advantage
from lockstep.trainer.setting import typed

RUN = "run"
"""Name of the run's own objective, with which all are compared."""
BYPASS = "bypass"
"""Correction of `correction.logp_old=bypass`, beside the modes."""
OF_THE_ROLLOUTS = (
    "epochs", "minibatches", "max_completion_tokens", "dynamic_sampling", "max_refills", "overlong_buffer",
    "overlong_penalty", "length_control", "length_weight", "solved_reward",
)  # fmt: skip
"""Settings of an algorithm that the saved rollouts, their rewards and the division of the step already have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    name: str
    config: Config
    changes: tuple[str, ...] = ()
    """Settings that differ from those of the run, as on the command line."""
    kept: tuple[str, ...] = ()
    """Settings of its preset that are left as in the run, because the rollouts already have them."""


def objectives_of(config: Config, names: Sequence[str], corrections: Sequence[str]) -> list[Objective]:
    """Return the run's own objective and each name under each correction.

    names: presets of `algorithm`, built-in losses or advantages, or path/to/file.py:function; none: the run's own.
    corrections: modes, or `bypass`; none: the run's own. Raises `ConfigError` for what the run cannot show.
    """
    objectives: dict[str, Objective] = {}
    common = {field: getattr(config.algorithm, field) for field in OF_THE_ROLLOUTS}
    for name, correction in [(RUN, None), *((one, c) for one in names or [RUN] for c in corrections or [None])]:
        algorithm = config.algorithm if name == RUN else _algorithm(name, config.algorithm)
        changed = replace(
            config,
            algorithm=replace(algorithm, **common),
            correction=config.correction if correction is None else _correction(correction, config.correction),
        )
        label = name if correction is None else f"{name} {correction}"
        if label not in objectives:
            _refuse(label, changed, config)
            changes = (*_changes("algorithm", config, changed), *_changes("correction", config, changed))
            left_settings = tuple(
                f"algorithm.{k}={typed(getattr(algorithm, k))}" for k, v in common.items() if _asks(algorithm, k, v)
            )
            objectives[label] = Objective(name=label, config=changed, changes=changes, kept=left_settings)
    return list(objectives.values())


def _asks(algorithm: AlgorithmConfig, key: str, value: object) -> bool:
    """Return True if an algorithm has another value than the run, and asks for it: it is not the default."""
    return getattr(algorithm, key) not in (value, getattr(AlgorithmConfig(), key))


def _algorithm(name: str, own: AlgorithmConfig) -> AlgorithmConfig:
    """Return the settings that training with this name would have: its preset over what the run changed of its own."""
    if names_function(name) or (name not in preset_names("algorithm") and name in (*POLICY_LOSSES, *ADVANTAGES)):
        return replace(own, **{"advantage" if is_advantage(name) else "loss": name})
    if name not in preset_names("algorithm"):
        names = [*preset_names("algorithm"), *POLICY_LOSSES, *ADVANTAGES]
        near = difflib.get_close_matches(name, names, n=1) or names
        raise ConfigError(f"--with {name}: expected {', '.join(near)}, or path/to/file.py:function")
    own_preset = _preset(own.name) if own.name in preset_names("algorithm") else {}
    before = _typed(own_preset)
    changed = {f.name: getattr(own, f.name) for f in fields(own) if getattr(own, f.name) != getattr(before, f.name)}
    return _typed({**changed, **_preset(name)})


def _preset(name: str) -> dict:
    return OmegaConf.to_container(OmegaConf.load(CONFIG_DIR / "algorithm" / f"{name}.yaml"))  # type: ignore[return-value]


def _typed(settings: dict) -> AlgorithmConfig:
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(AlgorithmConfig), settings))  # type: ignore[return-value]


def _correction(name: str, own: CorrectionConfig) -> CorrectionConfig:
    if name == BYPASS:
        return replace(own, mode="off", logp_old="bypass", rejection={}, batch_normalize=False, kl_penalty=0.0)
    if name not in CORRECTION_MODES:
        near = difflib.get_close_matches(name, CORRECTION_MODES, n=1) or [*CORRECTION_MODES, BYPASS]
        raise ConfigError(f"--corrections {name}: expected {', '.join(near)}")
    has_weights = CORRECTION_MODES[name].control is not None
    return replace(own, mode=name, logp_old="recompute", batch_normalize=own.batch_normalize and has_weights)


def _changes(section: str, before: Config, after: Config) -> list[str]:
    old, new = getattr(before, section), getattr(after, section)
    names = [field.name for field in fields(new) if (section, field.name) != ("algorithm", "name")]
    return [f"{section}.{n}={typed(getattr(new, n))}" for n in names if getattr(new, n) != getattr(old, n)]


def _refuse(name: str, config: Config, run: Config) -> None:
    """Raise `ConfigError` if the objective needs what the run has not saved, or its settings contradict each other."""
    plan, own, algorithm = config.plan, run.plan, config.algorithm
    needs = {
        "a critic, which the checkpoints of this run do not have; compare it on a run with algorithm=ppo":
            plan.has_critic and not own.has_critic,
        "a teacher's scores, which this run has not saved; compare it on a run with algorithm=opd teacher.path=...":
            plan.teaches_rollouts and not (own.teaches_rollouts and plan.teacher_top_k <= own.teacher_top_k),
        "greedy answers, which are not saved; compare algorithm.advantage=rloo":
            plan.needs_greedy,
        "the states or rewards of turns, which this run has not recorded; compare it on a run with it":
            plan.turn_rewards and not own.turn_rewards,
        "losses of routers, which are computed in the forward pass; add algorithm.router_aux_coef=0 "
        "algorithm.router_z_coef=0":
            algorithm.router_aux_coef != 0 or algorithm.router_z_coef != 0,
        "demonstrations alone; compare an algorithm that trains on rollouts":
            algorithm.trains_on != "rollouts",
    }  # fmt: skip
    for what, is_missing in needs.items():
        if is_missing:
            raise ConfigError(f"{name} needs {what}")
    try:
        # Nothing is scored or sampled, so stale rollouts may be seen without weights, too.
        rollout = replace(config.rollout, max_staleness=0)
        validate(replace(config, reward=RewardConfig(), rollout=rollout), needs_data=False)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
