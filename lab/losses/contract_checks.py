"""Checks of what a policy loss may do: its outputs, its inputs, other tokens, randomness, communication."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import fields, replace
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from lockstep.lab.finding import Finding, Verdict, failure
from lockstep.lab.losses.examined_loss import TOLERANCE, ExaminedLoss, change
from lockstep.rollout.errors import TrainingError
from lockstep.trainer.objective.declare import SEQUENCE
from lockstep.trainer.objective.losses.inputs import LossInputs

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "get_world_size", "get_rank", "barrier")
"""Beginnings of names in torch.distributed that tell ranks apart."""

NO_TOKENS = slice(0)


def check_outputs(examined: ExaminedLoss) -> Finding:
    """Call the loss with all tokens, with none, and without weights."""
    name = "one loss per token"
    try:
        losses_T = examined(examined.inputs()).loss_T
        examined(examined.inputs(NO_TOKENS))
        examined(replace(examined.inputs(), weights_T=None))
    except TrainingError as error:
        advice = "; leave out the .mean() or .sum() at its end" if examined.returns_number() else ""
        return failure(name, f"{error}{advice}.")
    if not losses_T.requires_grad:
        return failure(name, "The losses have no gradient: they are computed from detached logprobs; use logp_T.")
    return Finding(check=name)


def check_metrics(examined: ExaminedLoss) -> Finding:
    """Compare the metrics of a microbatch without tokens with those of the step."""
    name = "metrics of every microbatch"
    whole = examined(examined.inputs())
    empty = examined(examined.inputs(NO_TOKENS))
    if empty.metrics.keys() != whole.metrics.keys():
        missing = ", ".join(sorted(whole.metrics.keys() ^ empty.metrics.keys()))
        return failure(
            name,
            f"The metrics {missing} are not in every microbatch, but ranks add them up by name; return all of them "
            "always, with a sum of 0.",
        )
    for key, value in empty.metrics.items():
        if not value.isfinite():
            return failure(
                name, f"The metric {key} of a microbatch without tokens is {float(value)}; return a sum, which is 0."
            )
    return Finding(check=name)


def check_sums(examined: ExaminedLoss) -> Finding:
    """Compare the metrics of the step with the sums over two microbatches."""
    name = "metrics add up over microbatches"
    whole = examined(examined.inputs()).metrics
    halves = [examined(examined.inputs(slice(first, None, 2))).metrics for first in (0, 1)]
    for key, value in whole.items():
        before, after = float(value), math.fsum(float(half[key]) for half in halves)
        if not math.isclose(before, after, rel_tol=1e-6, abs_tol=1e-9):
            return failure(
                name,
                f"The metric {key} is {before:.4g} over one microbatch and {after:.4g} over two; return the sum over "
                "the tokens, which the trainer divides by their number.",
            )
    return Finding(check=name)


def check_own_token(examined: ExaminedLoss) -> Finding:
    """Compare the losses of every second token with and without the others in the microbatch."""
    name = "a token's loss without the others"
    selection = slice(None, None, 2)
    all_T, alone_T = examined.values(examined.inputs()), examined.values(examined.inputs(selection))
    whole_T = all_T[selection]
    shift = change(alone_T, whole_T)
    if shift <= TOLERANCE:
        return Finding(check=name, measured=f"{shift:.0e}")
    ratios_T = (alone_T / whole_T)[whole_T.abs() > 1e-9]
    if examined.shared is not None:
        advice = "return the losses before they are added up or averaged"
    elif len(ratios_T) and bool((ratios_T - len(all_T) / len(alone_T)).abs().max() < 1e-6):
        examined.shared = "it divides by the number of tokens in the microbatch"
        advice = "leave the division out, because the trainer divides by one number of the step (algorithm.normalizer)"
    else:
        examined.shared = "the loss of a token depends on the other tokens of its microbatch"
        advice = "use values of the token alone, and `sequence_log_ratio` for a mean over its rollout"
    return failure(
        name,
        f"The losses of {len(alone_T)} tokens change by {shift:.0%} when the other {len(all_T) - len(alone_T)} leave "
        f"the microbatch, so {examined.shared}; {advice}.",
        f"{shift:.0e}",
    )


def check_inputs(examined: ExaminedLoss) -> Finding:
    name = "inputs stay as they are"
    inputs = examined.inputs()
    before = {key: value.clone() for key, value in _tensors(inputs).items()}
    examined(inputs)
    keys = [key for key, value in _tensors(inputs).items() if not torch.equal(value, before[key])]
    return failure(name, f"It changes {', '.join(keys)} in place; work on a copy.") if keys else Finding(check=name)


def check_repetition(examined: ExaminedLoss) -> Finding:
    name = "same inputs, same losses"
    first_T, second_T = (examined.values(examined.inputs()).nan_to_num() for _ in range(2))
    if torch.equal(first_T, second_T):
        return Finding(check=name)
    return failure(name, "Two calls with the same inputs differ: it draws random numbers or keeps a state; do neither.")


def check_ratio(examined: ExaminedLoss) -> Finding:
    """Compare the declaration `has_ratio` with whether the losses change with the old logprobs."""
    name = "has_ratio as declared"
    has_sequence = SEQUENCE in examined.inputs().step_values
    uses_old = examined.changes_with_old() or has_sequence or examined.loss.weighs_by_sampling
    if uses_old == examined.loss.has_ratio:
        return Finding(check=name)
    verb = "change" if uses_old else "do not change"
    return Finding(
        check=name,
        verdict=Verdict.NOTE,
        sentence=f"The losses {verb} with old_logp_T; write @policy_loss(has_ratio={uses_old}) above the function, so "
        "that settings that need a ratio are checked.",
    )


def check_communication(examined: ExaminedLoss) -> Finding:
    """Look for names of torch.distributed in the code of the loss, and of functions of its file that it calls."""
    name = "no communication between ranks"
    names = sorted(one for one in _names_in(examined.loss.function) if one.startswith(COLLECTIVES))
    if not names:
        return Finding(check=name)
    return failure(
        name,
        f"It uses {', '.join(names)} of torch.distributed, so the gradient depends on the number of ranks, and ranks "
        "with different numbers of microbatches wait for each other; leave it out, because the trainer counts tokens "
        "over all ranks.",
    )


def _tensors(inputs: LossInputs) -> dict[str, Tensor]:
    values = {one.name: getattr(inputs, one.name) for one in fields(inputs)}
    return {name: value.detach() for name, value in values.items() if isinstance(value, Tensor)}


def _names_in(function: Callable[..., Any]) -> set[str]:
    """Return the names that the code of a function uses, with those of functions of its file that it names."""
    function = inspect.unwrap(function)
    if not inspect.isfunction(function):
        return set()
    codes: set[CodeType] = set()
    names: set[str] = set()

    def read(code: CodeType) -> None:
        if code in codes:
            return
        codes.add(code)
        names.update(code.co_names)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                read(constant)
        for name in code.co_names:
            other = function.__globals__.get(name)
            if inspect.isfunction(other) and other.__module__ == function.__module__:
                read(other.__code__)

    read(function.__code__)
    return names
