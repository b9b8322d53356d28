"""Checks of what a policy loss trains: which tokens it moves in the first update, in which direction, how far."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from lockstep.lab.finding import Finding, Verdict, failure
from lockstep.lab.losses.examined_loss import TOLERANCE, ExaminedLoss

ADVANTAGES, LENGTHS = (1.0, -1.0, 2.0, -0.5, -0.5, 2.0, -1.0, 1.0), (3, 2, 1, 3, 2, 1, 1, 2)
"""Advantages and lengths of the rollouts of a toy step. Their signs do not follow the parity of the numbers."""
LEVELS = (-0.1, -1.0, -3.0)
"""Logprobs of tokens [nats]."""
SIZES = (0.3, 0.7, 1.5, 3.0)
"""Absolute log ratios, of which the larger ones lie beyond the usual bounds [nats]."""


def check_first_update(examined: ExaminedLoss) -> Iterator[Finding]:
    """Look at the gradient at π_θ = π_old, where the first update of every rollout batch is."""
    name = "gradient in the first update"
    rollout_T = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    advantages_T = torch.tensor(ADVANTAGES, dtype=torch.float64)[rollout_T]
    slope_T = examined.gradient(examined.tokens(torch.zeros_like(advantages_T), advantages_T, rollout_T))
    is_trained_T = slope_T != 0
    num_rollouts = len(rollout_T[is_trained_T].unique())
    counts = f"{num_rollouts} of {len(LENGTHS)} rollouts, {int(is_trained_T.sum())} of {len(slope_T)} tokens"
    is_one_sign = any(torch.equal(is_trained_T, sign * advantages_T > 0) for sign in (1, -1))
    if num_rollouts == 0:
        sentence = "so nothing is trained with one update per rollout batch, the default."
        yield failure(name, f"The gradient is 0 at π_θ = π_old, {sentence}")
    elif bool(is_trained_T.all()) or examined.loss.step_values is not None:  # which may choose tokens
        yield Finding(check=name, measured=counts)
    elif is_one_sign:  # some algorithms train right answers alone
        sentence = f"Only tokens whose advantage is {'above' if bool(is_trained_T[0]) else 'below'} 0 are trained."
        yield Finding(check=name, verdict=Verdict.NOTE, sentence=sentence, measured=counts)
    else:
        first = int(is_trained_T.logical_not().nonzero()[0])
        yield failure(
            name,
            f"Only {counts} have a gradient at π_θ = π_old, so the others are not trained. The first without one is "
            f"in rollout {int(rollout_T[first])}, with the advantage {float(advantages_T[first]):g}; train each token "
            "whose advantage is not 0.",
            counts,
        )
    is_wrong_T = slope_T * advantages_T > 0
    effects = [
        f"{effect} ({int((is_wrong_T & part_T).sum())} of {int(part_T.sum())})"
        for effect, part_T in (
            ("lowers the probability of rewarded tokens", advantages_T > 0),
            ("raises the probability of punished tokens", advantages_T < 0),
        )
        if bool((is_wrong_T & part_T).any())
    ]
    name = "direction of the first update"
    if not effects:
        yield Finding(check=name)
        return
    yield failure(
        name,
        f"The first update {' and '.join(effects)}: the sign is wrong. The optimizer lowers the loss, so that of a "
        "token is −ratio × advantage.",
    )


def check_level(examined: ExaminedLoss) -> Finding:
    """Compare gradients at π_θ = π_old of tokens with one advantage and several probabilities."""
    name = "gradient at equal logprobs"
    level_T = torch.tensor(LEVELS, dtype=torch.float64)
    of_one_T = torch.ones(len(LEVELS), dtype=torch.int64)  # a rollout that is not the first
    inputs = examined.tokens(torch.zeros_like(level_T), torch.ones_like(level_T), of_one_T)
    at_levels = replace(
        inputs,
        logp_T=level_T.clone().requires_grad_(),
        old_logp_T=level_T.clone(),
        sampling_logp_T=level_T.clone(),
    )
    slope_T, value_T = examined.gradient(at_levels), examined.values(at_levels)
    if bool((slope_T - slope_T[0]).abs().max() <= TOLERANCE * slope_T.abs().max()):
        return Finding(check=name)
    first, last = float(slope_T[0]), float(slope_T[-1])
    sentence = (
        f"At π_θ = π_old, of two tokens with the advantage 1, the one with logp {LEVELS[0]:g} has the gradient "
        f"{first:.3g}, the one with {LEVELS[-1]:g} has {last:.3g}"
    )
    is_weight = torch.allclose(slope_T, value_T, rtol=1e-6) or not examined.changes_with_old()
    if is_weight:  # −weight × ratio × advantage, whose slope by logp is its value
        return Finding(check=name, verdict=Verdict.NOTE, sentence=f"{sentence}: it weighs tokens by their probability.")
    return failure(
        name,
        f"{sentence}, so it is not the ratio alone that has one: the two logprobs have different temperatures, a "
        "factor is not detached, or a term is of the logprob alone.",
    )


def check_pull(examined: ExaminedLoss) -> Finding:
    """Look at the gradient of tokens without an advantage, which only penalties have."""
    name = "penalties pull to the old policy"
    moved_T = torch.tensor([sign * size for size in SIZES for sign in (1.0, -1.0)], dtype=torch.float64)
    zero_T = torch.zeros_like(moved_T)
    slope_T = examined.gradient(examined.tokens(moved_T, zero_T, torch.arange(len(moved_T))))
    is_away_T = slope_T * moved_T < 0
    if not bool(is_away_T.any()):
        return Finding(check=name)
    shift = float(moved_T[is_away_T][0])
    return failure(
        name,
        f"With the advantage 0, a token that became {'more' if shift > 0 else 'less'} likely (log ratio {shift:g}) is "
        "moved further away from the old policy: a penalty has the wrong sign, or is the log ratio itself, whose "
        "gradient is not that of a KL (write exp(-x) + x - 1, or x² / 2, of the log ratio x).",
    )


def check_bounds(examined: ExaminedLoss) -> Finding:
    """Look for a gradient that ends where a token moved against its advantage, and goes on where it moved with it."""
    name = "bounds on the side of the advantage"
    advantages_T = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat_interleave(len(SIZES))
    moved_T = torch.tensor(SIZES, dtype=torch.float64).repeat(2) * advantages_T
    rollout_T = torch.arange(len(moved_T))
    against_T, along_T = (
        examined.gradient(examined.tokens(sign * moved_T, advantages_T, rollout_T)) for sign in (-1.0, 1.0)
    )
    is_wrong = ((against_T == 0) & (along_T != 0)).view(2, -1)
    is_never_raised = bool(is_wrong[0].all())
    is_wrong = is_wrong.all(dim=0)
    if is_never_raised and not bool(is_wrong.any()):
        return failure(
            name,
            "A rewarded token that became less likely has no gradient, at whatever ratio, but one that became more "
            "likely has: the ratio has a lower bound also where it must be raised. Bound it from above for rewarded "
            "tokens, from below for punished ones.",
        )
    if not bool(is_wrong.any()):
        return Finding(check=name)
    size = SIZES[int(is_wrong.nonzero()[0])]
    return failure(
        name,
        f"At a log ratio of {size:g} the gradient is 0 where a rewarded token became less likely, and not where it "
        "became more likely (and the reverse for punished ones), so updates go on without bound and are never taken "
        "back: max stands in place of min. Write -torch.minimum(ratio × A, clipped ratio × A).",
    )
