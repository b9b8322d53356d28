"""Signatures of the reward functions of files: how each is called, by the names of its parameters.

    f(rollout, ...)                                          one rollout
    f(rollouts, ...)                                         a group
    f(prompts, completions, ...)                             TRL's, `rewards/trl.py`
    f(data_source, solution_str, ground_truth, extra_info)   verl's; it may return {"score": ...} with values to log

Other parameters are settings. Not covered, and refused by name: signatures that need objects of their trainer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, update_wrapper
from inspect import Parameter
from typing import Any

from lockstep.rewards.batches import GROUP_PARAMETER, BatchReward, each, group_wise, plain
from lockstep.rewards.meter import current
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.records import Rollout
from lockstep.rollout.safe_text import error_text

NOT_BY_NAME = (Parameter.POSITIONAL_ONLY, Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
"""Kinds of parameters that a setting cannot name."""
TRL = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""Arguments that TRL 1.16 passes beside the columns."""
VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
FOREIGN = {
    "OpenRLHF": [{"queries"}],
    "slime": [{"args", "sample"}, {"args", "samples"}],
    "verifiers": [{"completion"}],
    "AReaL": [{"prompt", "completions"}],
    "verl's batch reward manager": [{"solution_strs"}],
    "verl's reward manager": [{"data", "return_dict"}],
    "open-instruct": [{"prediction", "label"}],
    "EasyR1": [{"reward_input"}, {"reward_inputs"}],
}
"""Trainers, and sets of parameters that tell their signatures from others."""
TEXTS = ("text", "response", "output", "answer", "solution", "prediction", "generation", "prompt")
"""First parameters that stand for a text. The function would get a rollout."""


def adapt(name: str, function: Callable[..., Any], settings: Mapping[str, Any]) -> BatchReward:
    """Return a function, or an instance of a class, as it is called here.

    Raises `ConfigError` for a signature that is not called, and for settings that are unknown or missing.
    """
    if inspect.isclass(function):
        function, settings = _instance(name, function, settings), {}
    parameters = _parameters(name, function)
    refuse_foreign(name, list(parameters))
    kinds = [parameter.kind for parameter in parameters.values()]
    if parameters.keys() & {*TRL, "environments"} or kinds == [Parameter.VAR_KEYWORD]:
        _refuse_unpassed(name, parameters, parameters.keys() - {"environments"}, "TRL")
        from lockstep.rewards.trl import from_trl

        return from_trl(function, **settings)
    if "solution_str" in parameters:
        _refuse_unpassed(name, parameters, {*VERL, *settings}, "verl")
        left = {key: parameter for key, parameter in parameters.items() if key not in settings}
        return each(partial(function, **settings), partial(_verl, left), _verl_score)
    first = next(iter(parameters), "")
    by_name = kinds[:1] == [Parameter.KEYWORD_ONLY]
    try:
        inspect.signature(function).bind(*[None] * (not by_name), **dict.fromkeys([first] * by_name), **settings)
    except TypeError:
        if first in ("rollout", GROUP_PARAMETER) or not settings.keys() <= parameters.keys():
            check_settings(name, function, settings, given=1, reads_rows=first == "rollout")
        raise _refusal(name, parameters.values()) from None
    if kinds == [Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD]:
        raise _refusal(name, parameters.values())
    if first == GROUP_PARAMETER:
        return group_wise(function, settings)
    return each(partial(function, **settings), (lambda rollout: {first: rollout}) if by_name else None)


def check_settings(
    name: str, function: Callable[..., Any], settings: Mapping[str, Any], *, given: int = 0, reads_rows: bool = False
) -> None:
    """Raise `ConfigError` unless the function can be called with `given` positional arguments and the settings.

    reads_rows: True for a user's function of a rollout, whose arguments may be meant as columns of its row.
    """
    signature = inspect.signature(function)
    try:
        signature.bind(*[None] * given, **settings)
        return
    except TypeError as error:
        problem = str(error)
    rest = list(signature.parameters.values())[given:]
    takes = [parameter.name for parameter in rest if parameter.kind not in NOT_BY_NAME]
    unknown = next((key for key in settings if key not in takes), None)
    missing = next((key for key in takes if key not in settings), "<name>")
    if unknown is None:
        column = f", or read the column of the row: rollout.example[{missing!r}]" if reads_rows else ""
        raise ConfigError(f"reward {name}: {problem}; set reward.settings.{name}.{missing}=<value>{column}")
    raise ConfigError(
        f"reward {name}: {problem}; it takes {', '.join(takes) or 'no settings'}: leave out "
        f"reward.settings.{name}.{unknown}"
    )


def refuse_foreign(name: str, parameters: Sequence[str]) -> None:
    """Raise `ConfigError` for names of parameters of a signature that is not called here."""
    for trainer, marks in FOREIGN.items():
        if any(mark <= {*parameters} for mark in marks):
            raise _refusal(name, parameters, f"is that of {trainer}, which needs objects of its trainer")
    if parameters and parameters[0] in TEXTS and not {*parameters} & {*TRL, "solution_str"}:
        raise _refusal(name, parameters)


def _refusal(name: str, parameters: Iterable[Any], what: str = "is none of a reward") -> ConfigError:
    return ConfigError(
        f"reward {name}: the signature {name}({', '.join(map(str, parameters))}) {what}; expected f(rollout), "
        "f(rollouts) for a group, TRL's f(prompts, completions, **columns), or verl's f(data_source, solution_str, "
        f"ground_truth, extra_info), and functools.wraps on decorators; write `def {name}(rollout)`, where "
        "rollout.answer is the sampled text, rollout.prompt are the messages before it, and rollout.example is the row"
    )


def _refuse_unpassed(name: str, parameters: Mapping[str, Parameter], known: Iterable[str], trainer: str) -> None:
    for key, parameter in parameters.items():
        is_needed = parameter.default is Parameter.empty and (parameter.kind not in NOT_BY_NAME[1:])
        if is_needed and (key not in known or parameter.kind is Parameter.POSITIONAL_ONLY):
            raise _refusal(name, parameters.values(), f"is that of {trainer}, but {key!r} is not passed here by name")


def _instance(name: str, kind: type, settings: Mapping[str, Any]) -> Callable[..., Any]:
    _parameters(name, kind)
    check_settings(name, kind, settings)
    try:
        instance = kind(**settings)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"reward {name} cannot be made: {type(error).__name__}: {error_text(error)}") from error
    if not callable(instance):
        raise ConfigError(f"reward {name} is a class without __call__; write `def __call__(self, rollout)` in it")
    return instance


def _parameters(name: str, function: Callable[..., Any]) -> Mapping[str, Parameter]:
    """Return the parameters. Those that a decorator without functools.wraps hides are of the function it holds."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise ConfigError(f"reward {name}: its signature cannot be read: {error}; wrap it in a function") from error
    if inspect.isfunction(function) and {parameter.kind for parameter in parameters.values()} <= {*NOT_BY_NAME[1:]}:
        callables = [value for value in inspect.getclosurevars(function).nonlocals.values() if callable(value)]
        if len(callables) == 1:
            update_wrapper(function, callables[0], assigned=(), updated=())  # as functools.wraps would have done
            return _parameters(name, callables[0])
    return parameters


def _verl(parameters: Mapping[str, Parameter], rollout: Rollout) -> Mapping[str, Any]:
    from lockstep.rewards.trl import keyword_arguments, sampled_text

    row = rollout.example
    reward_model = row.get("reward_model")
    truth = reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else None
    values = (
        row.get("data_source"),
        sampled_text(rollout),
        row.get("ground_truth", truth),
        row.get("extra_info") or {},
    )
    arguments = {key: value for key, value in zip(VERL, values, strict=True) if value is not None}
    return keyword_arguments(parameters, arguments, rollout.example)


def _verl_score(value: Any) -> Any:
    """Return the score of a dictionary, and log its other values."""
    if not isinstance(value, Mapping):
        return value
    from lockstep.rewards.trl import log_column

    for column in value.keys() - {"score"}:
        log_column(current(), 1, column, [value[column]])
    return plain(value["score"])
