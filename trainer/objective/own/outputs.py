"""Outputs of a user's loss or advantage, checked in shape and type before they reach the loss of the step.

Values are checked where that costs no wait for the device: advantages here, losses by the guard of the update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

from lockstep.rollout.errors import LockstepError, TrainingError
from lockstep.rollout.system.user_functions import fault
from lockstep.trainer.objective.advantages.critic import Credit, TokenAdvantages
from lockstep.trainer.objective.advantages.inputs import AdvantageInputs, Advantages, GroupStatistics
from lockstep.trainer.objective.losses.inputs import LossInputs, LossOutputs, common_metrics, token_ratio

if TYPE_CHECKING:
    from torch import Tensor


def checked_loss(function: Callable[..., Any], spec: str) -> Callable[..., LossOutputs]:
    """Return the loss with checked outputs: the losses alone, or `LossOutputs`. Common metrics are added.

    The result raises `TrainingError`: the function fails, or returns something else.
    """

    @wraps(function)
    def loss(inputs: LossInputs, **settings: Any) -> LossOutputs:
        with _errors_with_place(spec):
            outputs = function(inputs, **settings)
        loss_T, own = (outputs.loss_T, outputs.metrics) if isinstance(outputs, LossOutputs) else (outputs, {})
        _check_tensor(loss_T, inputs.logp_T, spec, "one loss per token, which the trainer adds up and divides")
        for name, value in own.items():
            _check_metric(name, value, spec)
        return LossOutputs(loss_T=loss_T, metrics={**common_metrics(inputs, token_ratio(inputs)), **own})

    return loss


def checked_advantage(function: Callable[..., Any], spec: str) -> Callable[..., Advantages]:
    """Return the estimator with checked outputs: the advantages alone, or `Advantages`. Common metrics are added.

    The result raises `TrainingError`, as that of `checked_loss`, also for advantages that are not finite.
    """

    @wraps(function)
    def estimate(inputs: AdvantageInputs, **settings: Any) -> Advantages:
        with _errors_with_place(spec):
            outputs = function(inputs, **settings)
        advantages_S, own = outputs if isinstance(outputs, Advantages) else (outputs, {})
        like, unit = (inputs.rewards_S, "rollout") if inputs.turns is None else (inputs.turns.returns_K, "turn")
        _check_tensor(advantages_S, like, spec, f"one advantage per {unit}")
        _check_finite(advantages_S, spec, "advantage")
        return Advantages(
            advantages_S.detach().to(inputs.rewards_S.dtype), {**GroupStatistics.of(inputs).metrics, **own}
        )

    return estimate


def checked_critic_advantage(function: Callable[..., Any], spec: str) -> Callable[..., TokenAdvantages]:
    """Return an estimator with a critic with checked outputs; raises as that of `checked_advantage`."""

    @wraps(function)
    def estimate(credit: Credit, chosen_N: Tensor, **settings: Any) -> TokenAdvantages:
        with _errors_with_place(spec):
            outputs = function(credit, chosen_N, **settings)
        if not isinstance(outputs, TokenAdvantages):
            raise TrainingError(f"{spec} returned {_kind(outputs)}, expected TokenAdvantages(advantages_N, returns_N)")
        for name, values_N in zip(("advantage", "return"), outputs, strict=True):
            _check_tensor(values_N, credit.rewards_N, spec, f"one {name} per trained token of the step")
            _check_finite(values_N, spec, name)
        return TokenAdvantages(outputs.advantages_N.detach(), outputs.returns_N.detach())

    return estimate


@contextmanager
def _errors_with_place(spec: str) -> Iterator[None]:
    """Raise `TrainingError` with file and line for an exception in a user's function; memory that ran out stays as it
    is, because the update is then repeated in smaller packs."""
    from lockstep.rollout.system.device_memory import (
        is_out_of_memory,
    )  # imports torch: settings are checked before that

    try:
        yield
    except LockstepError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise TrainingError(f"{spec} fails: {fault(error, spec.rpartition(':')[0])}") from error


def _check_tensor(found: Any, like: Tensor, spec: str, expected: str) -> None:
    from torch import Tensor

    if not isinstance(found, Tensor) or not found.is_floating_point():
        raise TrainingError(f"{spec} returned {_kind(found)}, expected a tensor of floats with {expected}")
    if found.shape != like.shape:
        raise TrainingError(f"{spec} returned the shape {tuple(found.shape)}, expected {tuple(like.shape)}: {expected}")
    if found.device != like.device:
        raise TrainingError(f"{spec} returned a tensor on {found.device}, expected {like.device} as its inputs")


def _check_finite(found: Tensor, spec: str, name: str) -> None:
    if not bool(found.isfinite().all()):
        where = int((~found.isfinite()).nonzero()[0])
        raise TrainingError(
            f"{spec} returned the {name} {float(found[where])} at index {where}, expected finite numbers"
        )


def _check_metric(name: str, value: Any, spec: str) -> None:
    from torch import Tensor

    if not isinstance(value, Tensor) or value.ndim or value.requires_grad:
        with_gradient = " with a gradient" if isinstance(value, Tensor) and value.requires_grad else ""
        raise TrainingError(
            f"{spec} returned the metric {name!r} as {_kind(value)}{with_gradient}, expected a detached sum over the "
            "tokens: a tensor without dimensions"
        )


def _kind(found: Any) -> str:
    from torch import Tensor

    if isinstance(found, Tensor):
        return f"a tensor of {str(found.dtype).removeprefix('torch.')} with the shape {tuple(found.shape)}"
    return f"an object of the type {type(found).__name__}"
