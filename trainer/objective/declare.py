"""Declarations of policy losses and advantages: requirements and settings.

A loss is one file in `losses/`, an advantage one file in `advantages/`. Its settings are its keyword arguments, each
annotated with a `Setting`; they become fields of `algorithm` under the same names:

    @policy_loss()
    def my_loss(inputs: LossInputs, *, sharpness: Annotated[float, Setting(default=1.0, description="...", above=0)]):
        ...

The schema, the checks, docs/settings.md, the tests of gradient equality and the training loop find it by its name.
Settings are checked before torch is imported, so neither folder imports it at load time: use methods of tensors, and
import `Tensor` under `TYPE_CHECKING`.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, get_args

from lockstep.trainer.setting import Setting

SEQUENCE = "seq_log_ratio"
"""Name of the step value of losses with one ratio per rollout."""

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """Type and declaration of a setting."""

    type: Any
    setting: Setting

    @property
    def may_be_none(self) -> bool:
        return type(None) in get_args(self.type)


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """A function with its settings."""

    function: Callable[..., Any]
    arguments: Mapping[str, Argument]
    given_in: str | None = None
    """Field of `Config.algorithm` that holds the settings of a user's function; None: each is a field of its own."""

    def __call__(self, *inputs: Any, **settings: Any) -> Any:
        """Call the function, with declared defaults for missing settings."""
        defaults = {name: argument.setting.default for name, argument in self.arguments.items()}
        return self.function(*inputs, **defaults | settings)

    def configured(self, settings: object) -> Callable[..., Any]:
        """Return the function with its settings bound. settings: `Config.algorithm`."""
        return partial(self.function, **self.values(settings))

    def values(self, settings: object) -> dict[str, Any]:
        if self.given_in is not None:
            defaults = {name: argument.setting.default for name, argument in self.arguments.items()}
            return defaults | getattr(settings, self.given_in)
        return {name: getattr(settings, name) for name in self.arguments}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss(Declared):
    """Policy loss: `LossInputs` and settings -> `LossOutputs`."""

    has_ratio: bool = True
    """True if the loss weights tokens by π_θ / π_old."""
    sequence_log_ratio: Callable[..., Any] | None = None
    """For losses with one ratio per rollout, whose tokens may lie in several microbatches: log ratios (N,), advantages
    (N,) and settings -> (N,) values, whose mean over the rollout is `LossInputs.seq_log_ratio_S`."""
    has_sequence_ratio: Callable[..., bool] = lambda **settings: True
    """Settings -> False where the loss does not use it."""
    step_values: Callable[..., Mapping[str, Any]] | None = None
    """For losses that compare a token with others of its optimizer step: `StepInputs` and settings -> named (N,)
    tensors, `LossInputs.step_values` at the tokens of a microbatch. Every rank computes them before the first backward
    pass, so ranks and microbatches do not change them."""
    needs_entropy: bool = False
    """True if `step_values` reads entropies, which cost one more forward pass per update."""
    weighs_by_sampling: bool = False
    """True if its ratio is to the sampling policy: it takes no weights of the rollout correction, which are part of
    this ratio."""

    def whole_step(self, settings: object) -> Callable[..., Mapping[str, Any]] | None:
        """Return the function of `StepInputs` with the values of `LossInputs.step_values`; None if the loss has none.

        A rollout's mean of `sequence_log_ratio` is a value of each of its tokens, `SEQUENCE`.
        """
        bound, parts = self.values(settings), []
        if self.sequence_log_ratio is not None and self.has_sequence_ratio(**bound):
            parts.append(partial(_sequence_values, partial(self.sequence_log_ratio, **bound)))
        if self.step_values is not None:
            parts.append(partial(self.step_values, **bound))
        return (lambda inputs: dict(ChainMap(*(part(inputs) for part in parts)))) if parts else None


def _sequence_values(of_token: Callable[..., Any], inputs: Any) -> Mapping[str, Any]:
    from lockstep.trainer.objective.per_rollout import rollout_mean  # imports torch

    values_N = of_token(inputs.logp_N - inputs.old_logp_N, inputs.advantages_N)
    return {SEQUENCE: rollout_mean(values_N, inputs.rollout_N, inputs.num_rollouts)[inputs.rollout_N]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantage(Declared):
    """Advantage estimator: `AdvantageInputs` and settings -> `Advantages`.

    With a critic: `Credit`, chosen tokens and settings -> `TokenAdvantages`.
    """

    compares_group: bool = False
    """True if it compares a rollout with the others of its group: in a group of one the advantage is 0."""
    needs_greedy: bool = False
    """True if the baseline is the reward of the greedy answer to the same prompt."""
    needs_critic: bool = False
    """True if a critic is trained."""
    needs_states: bool = False
    """True if it compares turns of equal state (`AdvantageInputs.turns`) and returns one advantage per turn."""
    takes_turns: bool = True
    """True if it can compare turns in place of rollouts (`algorithm.turn_rewards`)."""
    kl_in_reward: bool = False
    """True if its source puts the KL penalty into the reward (`algorithm.kl_place`)."""


POLICY_LOSSES: dict[str, PolicyLoss] = {}
"""By name; filled when `lockstep.trainer.objective.losses` is imported."""
ADVANTAGES: dict[str, Advantage] = {}
"""By name; filled when `lockstep.trainer.objective.advantages` is imported."""
NEEDS: dict[Callable[..., Any], tuple[type[Declared], Mapping[str, Any]]] = {}
"""Kind and needs of decorated functions in users' files, which `trainer/objective/own/lookup.py` declares."""


def policy_loss(**needs: Any) -> Callable[[Function], Function]:
    """Declare a policy loss under the name of its function. needs: fields of `PolicyLoss`."""
    return _declare(PolicyLoss, POLICY_LOSSES, needs)


def advantage(**needs: Any) -> Callable[[Function], Function]:
    """Declare an advantage under the name of its function. needs: fields of `Advantage`."""
    return _declare(Advantage, ADVANTAGES, needs)


def _declare(kind: type, registry: dict[str, Any], needs: dict[str, Any]) -> Callable[[Function], Function]:
    def declare(function: Function) -> Function:
        if function.__module__.startswith(f"{__package__}."):
            registry[function.__name__] = kind(function=function, arguments=_arguments(function), **needs)
        else:
            NEEDS[function] = (kind, needs)
        return function

    return declare


def import_all(package: str, path: Sequence[str]) -> None:
    """Import every module of a package, so that its declarations run."""
    for module in pkgutil.iter_modules(path):
        importlib.import_module(f"{package}.{module.name}")


def declared_arguments() -> dict[str, Argument]:
    """Return every setting of all losses and advantages by name. It may be None if any of its functions takes None.

    Raises:
        TypeError: two functions declare one name differently.
    """
    arguments: dict[str, Argument] = {}
    for objective in (*POLICY_LOSSES.values(), *ADVANTAGES.values()):
        for name, argument in objective.arguments.items():
            first = arguments.setdefault(name, argument)
            if first.setting != argument.setting:
                raise TypeError(f"setting algorithm.{name} has two different declarations; share one Setting")
            if argument.may_be_none:
                arguments[name] = argument
    return arguments


def _arguments(function: Callable[..., Any]) -> dict[str, Argument]:
    """Return the keyword-only arguments. Raises TypeError for one that is not annotated with a `Setting`."""
    arguments = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            continue
        kind, *metadata = get_args(parameter.annotation) or (None,)
        if len(metadata) != 1 or not isinstance(metadata[0], Setting):
            raise TypeError(
                f"{function.__name__}: argument {name} is not Annotated[<type>, Setting(...)], or its module has "
                "`from __future__ import annotations`, which turns annotations into text"
            )
        arguments[name] = Argument(type=kind, setting=metadata[0])
    return arguments
