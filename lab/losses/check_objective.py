"""Examination of a loss or an advantage by name: a table with one verdict per line, and a sentence per failure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lockstep.lab.finding import Finding, Verdict
from lockstep.lab.losses.advantage_checks import examine_advantage
from lockstep.lab.losses.check_update import examine_update
from lockstep.lab.losses.loss_checks import examine_loss
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.safe_text import safe_text
from lockstep.trainer.checks.names import own_setting_problems
from lockstep.trainer.objective.declare import Declared, PolicyLoss
from lockstep.trainer.objective.own.lookup import advantage_named, is_advantage, policy_loss_named
from lockstep.trainer.setting import typed


def check_objective(
    name: str, words: Sequence[str], examine: Callable[..., Iterable[Finding]] = examine_update
) -> bool:
    """Examine a loss or an advantage and print the findings. Returns False if a check fails.

    Args:
        name: a built-in name, or path/to/file.py:function.
        words: settings, name=value.
        examine: checks of the trainer's update.

    Raises `ConfigError`: the function cannot be loaded, or a setting is wrong.
    """
    torch.manual_seed(0)
    is_loss = not is_advantage(name)
    objective = policy_loss_named(name) if is_loss else advantage_named(name)
    settings = _settings(objective, words)
    fields = settings if objective.given_in is None else {objective.given_in: settings}
    algorithm = {"loss" if is_loss else "advantage": name, **fields}
    update = partial(examine, algorithm, is_loss=is_loss)
    _announce(name, "policy loss" if is_loss else "advantage", objective, settings)
    if isinstance(objective, PolicyLoss):
        return _print(examine_loss(objective, settings, update))
    return _print(examine_advantage(objective, settings, update))


def _settings(declared: Declared, words: Sequence[str]) -> dict[str, Any]:
    try:
        settings: Any = OmegaConf.to_container(OmegaConf.from_dotlist(list(words)), resolve=True)
    except (OmegaConfBaseException, YAMLError, ValueError) as error:
        raise ConfigError(f"{' '.join(words)} cannot be read ({error}); expected name=value") from error
    if problems := list(own_setting_problems(declared, settings, "")):
        raise ConfigError("\n".join(problems))
    return settings


def _announce(name: str, kind: str, declared: Declared, settings: dict[str, Any]) -> None:
    values = {key: argument.setting.default for key, argument in declared.arguments.items()} | settings
    text = ", ".join(f"{key}={typed(value)}" for key, value in values.items())
    print(f"{name}: {kind}{f' with {text}' if text else ''}\n")


def _print(findings: Any) -> bool:
    """Print each finding as soon as it is made, then the sentences. Returns False if one is a failure."""
    all_findings: list[Finding] = []
    for finding in findings:
        print(f"{finding.check:<48} {finding.verdict:<6}{finding.measured}".rstrip(), flush=True)
        all_findings.append(finding)
    sentences = dict.fromkeys((finding.verdict, finding.sentence) for finding in all_findings if finding.sentence)
    print()
    for verdict, sentence in sentences:
        print(f"{verdict}: {safe_text(sentence)}")
    num_failures = sum(finding.verdict is Verdict.FAILS for finding in all_findings)
    print(f"{len(all_findings) - num_failures} of {len(all_findings)} checks passed")
    return not num_failures
