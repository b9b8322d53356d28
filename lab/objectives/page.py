"""Page of a comparison: numbers, cosines as a heat map, predictions with their errors, weights as bars."""

from __future__ import annotations

import math
from pathlib import Path

from lockstep.lab.objectives.objective_numbers import Comparison, Estimate
from lockstep.lab.pages.chart import number
from lockstep.lab.pages.render import render, write_page

TITLES = {
    "length": "length of the rollout [trained tokens]",
    "turn": "turn",
    "class": "class of the token",
    "sign": "sign of the advantage",
}


def write_objectives_page(path: Path, comparison: Comparison) -> None:
    """Write the page and create its directories. Raises OSError if the path cannot be written."""
    write_page(path, objectives_page(comparison))


def objectives_page(comparison: Comparison) -> str:
    """Render the page as HTML."""
    rows = comparison.rows
    columns = {
        kind: [name for name in tokens if tokens[name] or any(row.shares[kind][name] for row in rows)]
        for kind, tokens in comparison.tokens.items()
    }

    def largest(name: str) -> float:
        """Return the largest absolute value of a column, with its error; 1 if all are 0 or unknown."""
        values = [getattr(row, name) for row in rows]
        ends = [abs(one.mean) + one.error if isinstance(one, Estimate) else abs(one) for one in values]
        return max([end for end in ends if math.isfinite(end)], default=0.0) or 1.0

    return render(
        "objectives.html.jinja",
        comparison=comparison,
        largest={name: largest(name) for name in ("norm", "signal_to_noise", "step")},
        reach={name: largest(name) for name in ("predicted", "against_run")},
        shown=columns,
        titles=TITLES,
        place=lambda value, reach: 50 + 50 * value / reach,  # position on an axis around 0 [%]
        number=number,
        isfinite=math.isfinite,
    )
