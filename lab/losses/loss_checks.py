"""All checks of a policy loss, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from lockstep.lab.finding import Finding, Verdict, failure
from lockstep.lab.losses.contract_checks import (
    check_communication,
    check_inputs,
    check_metrics,
    check_outputs,
    check_own_token,
    check_ratio,
    check_repetition,
    check_sums,
)
from lockstep.lab.losses.direction_checks import (
    check_bounds,
    check_first_update,
    check_level,
    check_pull,
)
from lockstep.lab.losses.examined_loss import ExaminedLoss
from lockstep.lab.losses.gradient_checks import (
    check_extremes,
    check_finite_differences,
    check_old_logprobs,
    check_weights,
)
from lockstep.rollout.errors import LockstepError
from lockstep.trainer.objective.declare import PolicyLoss

CHECKS = (
    check_communication,
    check_metrics,
    check_own_token,
    check_sums,
    check_old_logprobs,
    check_weights,
    check_finite_differences,
    check_first_update,
    check_level,
    check_pull,
    check_bounds,
    check_extremes,
    check_ratio,
)


def examine_loss(
    loss: PolicyLoss,
    settings: Mapping[str, Any],
    update: Callable[[str | None], Iterable[Finding]] = lambda cause: (),
) -> Iterator[Finding]:
    """Yield the finding of each check.

    Args:
        settings: of the loss, by name; declared defaults for others.
        update: further checks, after those of the toy step. Takes the cause of a dependence on the other tokens of a
            microbatch, if it is known.

    A loss that fails, changes its inputs or draws random numbers is not examined further, because the other checks
    would blame something else. A loss that returns one number is.
    """
    examined_loss = ExaminedLoss(loss, settings)
    yield (finding := check_outputs(examined_loss))
    if finding.verdict is Verdict.FAILS:
        if not examined_loss.returns_number():
            return
        examined_loss.expand_number()
    for check in (check_inputs, check_repetition):
        yield (finding := check(examined_loss))
        if finding.verdict is Verdict.FAILS:
            return
    for check in CHECKS:
        try:
            finding = check(examined_loss)
            yield from [finding] if isinstance(finding, Finding) else finding
        except LockstepError as error:
            yield failure(check.__name__.removeprefix("check_").replace("_", " "), f"{error}.")
    yield from update(examined_loss.shared)
