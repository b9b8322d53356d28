"""Checks that losses, gradients and metrics of a step do not depend on its division into ranks and microbatches."""

from __future__ import annotations

import math
from collections.abc import Iterator

from lockstep.trainer.objective.examination.examined_loss import TOLERANCE, ExaminedLoss, change
from lockstep.trainer.objective.examination.finding import Finding, failure
from lockstep.trainer.objective.examination.toy_step import partitions
from lockstep.trainer.objective.loss_normalization import NORMALIZERS


def check_own_token(examined: ExaminedLoss) -> Finding:
    """Compare the losses of every second token with and without the others in the microbatch."""
    name = "a token's loss without the others"
    kept = examined.step.kept
    chosen = kept[::2]
    whole_T = examined.values(examined.inputs())[::2]
    alone_T = examined.values(examined.inputs(chosen))
    changed = change(alone_T, whole_T)
    if changed <= TOLERANCE:
        return Finding(check=name, measured=f"{changed:.0e}")
    ratios_T = (alone_T / whole_T)[whole_T.abs() > 1e-9]
    if examined.shared is not None:
        advice = "return the losses before they are added up or averaged"
    elif len(ratios_T) and bool((ratios_T - len(kept) / len(chosen)).abs().max() < 1e-6):
        examined.shared = "it divides by the number of tokens in the microbatch"
        advice = "leave the division out, because the trainer divides by one number of the step (algorithm.normalizer)"
    else:
        examined.shared = "the loss of a token depends on the other tokens of its microbatch"
        advice = "use values of the token alone, and `sequence_log_ratio` for a mean over its rollout"
    return failure(
        name,
        f"The losses of {len(chosen)} tokens change by {changed:.0%} when the other {len(kept) - len(chosen)} leave "
        f"the microbatch, so {examined.shared}; {advice}.",
        f"{changed:.0e}",
    )


def check_divisions(examined: ExaminedLoss) -> Iterator[Finding]:
    """Compare gradients and metrics of each division with those of one microbatch, for every denominator."""
    step, loss, settings = examined.step, examined.loss, examined.settings
    whole = {name: step.update(loss, settings, name, [[step.kept]]) for name in NORMALIZERS}
    metrics: list[str] = []
    for division, ranks in partitions(step).items():
        updates = {name: step.update(loss, settings, name, ranks) for name in NORMALIZERS}
        changes = {name: change(update.gradient, whole[name].gradient) for name, update in updates.items()}
        worst = max(changes, key=lambda name: changes[name])
        check, measured = f"gradient, {division}", f"{changes[worst]:.0e}"
        if changes[worst] <= TOLERANCE:
            yield Finding(check=check, measured=measured)
        else:
            yield failure(
                check,
                f"With {division} and algorithm.normalizer={worst} the gradient changes by {changes[worst]:.0%} "
                f"against one microbatch: {examined.shared or 'the loss depends on the division of the step'}.",
                measured,
            )
        before, after = whole["token"].metrics, updates["token"].metrics
        metrics += [
            f"{metric} is {before[metric]:.4g} over one microbatch and {after[metric]:.4g} over {division}"
            for metric in before
            if not math.isclose(before[metric], after[metric], rel_tol=1e-6, abs_tol=1e-9)
        ]
    check = "metrics add up over microbatches"
    if metrics:
        yield failure(
            check,
            f"The metric {metrics[0]}; return the sum over the tokens, which the trainer divides by their number.",
        )
    else:
        yield Finding(check=check)
