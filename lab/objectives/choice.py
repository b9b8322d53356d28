"""The objectives of a comparison: algorithms and corrections in place of those of the run."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

from omegaconf import OmegaConf

from lockstep.rollout.errors import ConfigError
from lockstep.rollout.system.user_functions import names_function
from lockstep.trainer.compose import CONFIG_DIR, preset_names
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.config.groups.correction_settings import CorrectionConfig
from lockstep.trainer.config.plan import StepPlan
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
    algorithm: AlgorithmConfig
    correction: CorrectionConfig
    changes: tuple[str, ...] = ()
    """Settings that differ from those of the run, as on the command line."""
    kept: tuple[str, ...] = ()
    """Settings of its preset that are left as in the run, because the rollouts already have them."""


def objectives_of(
    own: AlgorithmConfig,
    own_correction: CorrectionConfig,
    *,
    names: Sequence[str],
    corrections: Sequence[str],
    check: Callable[[str, AlgorithmConfig, CorrectionConfig], None] = lambda *_: None,
) -> list[Objective]:
    """Return the run's own objective and each name under each correction.

    Args:
        own, own_correction: settings of the run.
        names: presets of `algorithm`, built-in losses or advantages, or path/to/file.py:function; none: the run's own.
        corrections: modes, or `bypass`; none: the run's own.
        check: raises `ConfigError` for an objective, with its name, that the run cannot show.

    Raises `ConfigError` for unknown names.
    """
    objectives: dict[str, Objective] = {}
    common = {field: getattr(own, field) for field in OF_THE_ROLLOUTS}
    for name, mode in [(RUN, None), *((one, c) for one in names or [RUN] for c in corrections or [None])]:
        label = name if mode is None else f"{name} {mode}"
        if label in objectives:
            continue
        settings = own if name == RUN else _algorithm(name, own)
        algorithm = replace(settings, **common)
        correction = own_correction if mode is None else _correction(mode, own_correction)
        check(label, algorithm, correction)
        objectives[label] = Objective(
            name=label,
            algorithm=algorithm,
            correction=correction,
            changes=(*_changes("algorithm", own, algorithm), *_changes("correction", own_correction, correction)),
            kept=tuple(
                f"algorithm.{k}={typed(getattr(settings, k))}" for k, v in common.items() if _asks(settings, k, v)
            ),
        )
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


def _changes(
    section: str, old: AlgorithmConfig | CorrectionConfig, new: AlgorithmConfig | CorrectionConfig
) -> list[str]:
    names = [field.name for field in fields(new) if (section, field.name) != ("algorithm", "name")]
    return [f"{section}.{n}={typed(getattr(new, n))}" for n in names if getattr(new, n) != getattr(old, n)]


def refuse_unsaved(name: str, plan: StepPlan, saved: StepPlan, algorithm: AlgorithmConfig) -> None:
    """Raise `ConfigError` if an objective needs what the run has not saved. saved: plan of the run."""
    needs = {
        "a critic, which the checkpoints of this run do not have; compare it on a run with algorithm=ppo":
            plan.has_critic and not saved.has_critic,
        "a teacher's scores, which this run has not saved; compare it on a run with algorithm=opd teacher.path=...":
            plan.teaches_rollouts and not (saved.teaches_rollouts and plan.teacher_top_k <= saved.teacher_top_k),
        "greedy answers, which are not saved; compare algorithm.advantage=rloo":
            plan.needs_greedy,
        "rewards of turns, which this run has not recorded; compare it on a run with algorithm.turn_rewards=true":
            plan.turn_rewards and not saved.turn_rewards,
        "losses of routers, which are computed in the forward pass; add algorithm.router_aux_coef=0 "
        "algorithm.router_z_coef=0":
            algorithm.router_aux_coef != 0 or algorithm.router_z_coef != 0,
        "demonstrations alone; compare an algorithm that trains on rollouts":
            algorithm.trains_on != "rollouts",
    }  # fmt: skip
    for what, is_missing in needs.items():
        if is_missing:
            raise ConfigError(f"{name} needs {what}")
