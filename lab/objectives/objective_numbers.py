"""Numbers of a comparison of objectives, as JSON and as tables.

Dimensions: _O objectives, _G held-out groups, _N trained tokens of the step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.lab.diagnosis.token_classes import CLASSES
from lockstep.lab.objectives.choice import Objective
from lockstep.lab.objectives.gradients import Measured, dot
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.credit.targets import Targets
from lockstep.trainer.objective.per_rollout import rollout_count

SIGNS = ("negative", "zero", "positive")
LAST_TURN = 4
"""Turns from this one on are counted together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Mean over groups with its standard error."""

    mean: float
    error: float

    @classmethod
    def of(cls, values_G: np.ndarray) -> Estimate:
        count = len(values_G)
        error = float(values_G.std(ddof=1)) / math.sqrt(count) if count > 1 else math.nan
        return cls(mean=float(values_G.mean()) if count else math.nan, error=error)

    def __str__(self) -> str:
        return f"{self.mean:+.2e} ± {self.error:.0e}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Numbers of one objective."""

    name: str
    changes: tuple[str, ...]
    norm: float
    signal_to_noise: float
    clipped: float | None
    """Share of the tokens in the loss mask that the loss counts as clipped; None: it counts none."""
    untrained: float
    """Share of the trained tokens with an advantage whose weight is 0."""
    total_weight: float
    """Σ |∂loss/∂log π| over tokens."""
    shares: Mapping[str, Mapping[str, float]]
    """Share of that sum by `length`, `turn`, `class` and `sign`."""
    step: float
    predicted: Estimate
    against_run: Estimate
    """Prediction less that of the run's own objective, paired by group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    about: Mapping[str, Any]
    """Run, step, weights, optimizer step, optimizer, held-out rollouts, their effective share, and notes."""
    rows: tuple[Row, ...]
    cosines: tuple[tuple[float, ...], ...]
    tokens: Mapping[str, Mapping[str, float]]
    """Share of the tokens, with names as in `Row.shares`; signs of advantages are the run's own."""

    def to_json(self) -> dict[str, Any]:
        """Return plain values; numbers that are not finite are None."""
        return _finite(asdict(self))


def compared(
    objectives: Sequence[Objective],
    measured: Sequence[Measured],
    targets: Sequence[Targets],
    batch: StepBatch,
    rollouts: np.ndarray,
    class_N: Tensor,
    *,
    slopes_GO: np.ndarray,
    steps: Sequence[float],
    **about: Any,
) -> Comparison:
    """Compute the numbers.

    Args:
        rollouts: those of the optimizer step (indices).
        class_N: classes of the trained tokens.
        slopes_GO: change of the mean reward of each held-out group by the update of each objective, to first order.
        steps: norm of the update of each objective.
        about: what was compared, by name, for `Comparison.about`.
    """
    in_step_N = torch.isin(batch.rollout_N, torch.from_numpy(rollouts))
    fixed = {
        "length": _lengths(batch, in_step_N),
        "turn": {f"{n + 1}": batch.turns_N == n for n in range(LAST_TURN - 1)}
        | {f"{LAST_TURN}+": batch.turns_N >= LAST_TURN - 1},
        "class": {name: class_N == number for number, name in enumerate(CLASSES)},
    }
    rows = []
    for number, (one, gradient, of) in enumerate(zip(objectives, measured, targets, strict=True)):
        weights_N, keep_N = gradient.weights_N.abs().double(), of.keep_N & in_step_N
        has_advantage_N = in_step_N & (of.advantages_N != 0)
        clipped = gradient.sums.get("policy/clip_frac")
        rows.append(
            Row(
                name=one.name,
                changes=one.changes,
                norm=gradient.norm,
                signal_to_noise=gradient.signal_to_noise,
                clipped=None if clipped is None else clipped / max(int(keep_N.sum()), 1),
                untrained=float((weights_N[has_advantage_N] == 0).double().mean())
                if has_advantage_N.any()
                else math.nan,
                total_weight=float(weights_N.sum()),
                shares=_shares(fixed | {"sign": _signs(of)}, weights_N),
                step=steps[number],
                predicted=Estimate.of(slopes_GO[:, number]),
                against_run=Estimate.of(slopes_GO[:, number] - slopes_GO[:, 0]),
            )
        )
    gradients = [one.gradient_P for one in measured]
    return Comparison(
        about=about,
        rows=tuple(rows),
        cosines=tuple(tuple(_cosine(a, b) for b in gradients) for a in gradients),
        tokens=_shares(fixed | {"sign": _signs(targets[0])}, in_step_N.double()),
    )


def _lengths(batch: StepBatch, in_step_N: Tensor) -> dict[str, Tensor]:
    """Divide the tokens by the length of their rollout [trained tokens] into quarters of the rollouts."""
    count_S = rollout_count(batch.rollout_N, batch.num_rollouts)
    lengths_N = count_S[batch.rollout_N]
    present = count_S[torch.unique(batch.rollout_N[in_step_N])].double()
    edges = torch.unique(torch.quantile(present, torch.tensor([0.25, 0.5, 0.75, 1.0]).double()).long()).tolist()
    lows = [int(present.min()), *(edge + 1 for edge in edges[:-1])]
    return {f"{low}-{high}": (lengths_N >= low) & (lengths_N <= high) for low, high in zip(lows, edges, strict=True)}


def _signs(targets: Targets) -> dict[str, Tensor]:
    return {name: targets.advantages_N.sign() == number - 1 for number, name in enumerate(SIGNS)}


def _shares(buckets: Mapping[str, Mapping[str, Tensor]], weights_N: Tensor) -> dict[str, dict[str, float]]:
    total = max(float(weights_N.sum()), 1e-300)
    return {
        kind: {name: float(weights_N[inside_N].sum()) / total for name, inside_N in of_kind.items()}
        for kind, of_kind in buckets.items()
    }


def _cosine(a_P: Tensor, b_P: Tensor) -> float:
    lengths = (dot(a_P, a_P) * dot(b_P, b_P)) ** 0.5
    return dot(a_P, b_P) / lengths if lengths else math.nan


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def tables(comparison: Comparison) -> str:
    """Return the comparison as text."""
    about, rows = comparison.about, comparison.rows
    width = max(len("objective"), *(len(row.name) for row in rows))
    lines = [
        f"step {about['step']} of {about['run']}, optimizer step {about['optimizer_step']}, weights of update "
        f"{about['weights']}",
        *(f"{row.name:<{width}}  {' '.join(row.changes) or 'as in the run'}" for row in rows),
        "",
        f"{'objective':<{width}} {'norm':>9} {'signal/noise':>13} {'clipped':>8} {'no weight':>10} {'|update|':>9}   "
        "predicted change of reward   against the run",
    ]
    for row in rows:
        clipped = "-" if row.clipped is None else f"{row.clipped:.1%}"
        lines.append(
            f"{row.name:<{width}} {row.norm:>9.3g} {row.signal_to_noise:>13.3f} {clipped:>8} {row.untrained:>10.1%} "
            f"{row.step:>9.2e}   {row.predicted!s:>26}   {row.against_run!s:>16}"
        )
    lines += ["", "cosines"]
    lines += [
        f"{row.name:<{width}} {' '.join(f'{cosine:>8.4f}' for cosine in cosines)}"
        for row, cosines in zip(rows, comparison.cosines, strict=True)
    ]
    for kind, tokens in comparison.tokens.items():
        names = [name for name in tokens if tokens[name] or any(row.shares[kind][name] for row in rows)]
        lines += ["", f"{'weight by ' + kind:<{width + 8}} {' '.join(f'{name:>13}' for name in names)}"]
        shares = [("tokens", tokens), *((row.name, row.shares[kind]) for row in rows)]
        lines += [f"{label:<{width + 8}} {' '.join(f'{of[name]:>13.1%}' for name in names)}" for label, of in shares]
    lines += ["", f"update: {about['optimizer']}", f"held out: {about['heldout']}"]
    lines.append(f"effective share of the held-out rollouts: {about['effective']:.0%}")
    return "\n".join([*lines, *(f"note: {note}" for note in about["notes"])])
