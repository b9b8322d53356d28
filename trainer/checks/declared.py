"""Checks from the declarations of settings (`trainer/setting.py`): values, and settings without effect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.config.hints import closest
from lockstep.trainer.config.schema import Config
from lockstep.trainer.objective.own.lookup import advantage_named, policy_loss_named
from lockstep.trainer.setting import declarations, typed


def value_problems(settings: Any, prefix: str = "") -> Iterator[str]:
    """Yield one sentence per value outside of its declared range or choices. settings: a dataclass of settings."""
    for name, (setting, value) in declarations(settings, prefix).items():
        if value is None or (problem := setting.problem(value)) is None:
            continue
        hint = closest(str(value), [str(choice) for choice in setting.choices]) if setting.choices else ""
        yield f"{name}={typed(value)} {problem}{hint}; set {name}={typed(setting.default)}"


def missing_problems(config: Config, *, needs_data: bool, trains: bool, scores: bool) -> Iterator[str]:
    """Yield one sentence per setting without a default that is not set, with an example.

    Arguments: those of `validate`.
    """
    only_tasks = not trains and not config.heldout_sets() and config.eval.lm_eval.tasks  # which score themselves
    requirements = {
        "model.path": True,
        "data.path": needs_data and trains and not config.data.sources,
        "reward.functions": needs_data and scores and config.has_rollouts and not only_tasks,
    }
    settings = declarations(config)
    missing = [name for name, is_needed in requirements.items() if is_needed and not settings[name][1]]
    for name in missing:
        demo = ", or experiment=demo for the demo" if name == missing[-1] else ""
        yield f"{name} is not set and has no default; set it, for example {settings[name][0].example}{demo}"


def choices_hold(settings: Any) -> bool:
    """Return True if every setting with choices has one of them; checks of conflicts rely on it."""
    pairs = declarations(settings).values()
    return all(value is None or not setting.choices or setting.problem(value) is None for setting, value in pairs)


def null_problems(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Yield one sentence per null setting that the chosen loss or advantage needs."""
    objectives = {"loss": policy_loss_named(algorithm.loss), "advantage": advantage_named(algorithm.advantage)}
    for kind, objective in objectives.items():
        for name, value in objective.values(algorithm).items():
            argument = objective.arguments[name]
            if value is None and not argument.may_be_none:
                yield (
                    f"algorithm.{name}=null: algorithm.{kind}={getattr(algorithm, kind)} needs a value; set "
                    f"algorithm.{name}={typed(argument.setting.default)}"
                )


def unused_problems(config: Config) -> Iterator[str]:
    """Yield one sentence per setting that differs from the default of the schema and has no effect in training."""
    settings = declarations(config)
    for name, (setting, value) in settings.items():
        when = setting.when
        if when is None or value == setting.default or when.holds(config):
            continue
        causes = " and ".join(f"{cause}={typed(settings[cause][1])}" for cause in when.causes() if cause in settings)
        yield (
            f"{name}={typed(value)} does nothing {f'with {causes}' if causes else 'in training'}; set {when.instead}, "
            f"or {name}={typed(setting.default)}"
        )
