"""Curves of a run in the output of a notebook's cell: afterwards, and while it trains."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.lab.pages.chart import Chart, Curve
from lockstep.lab.pages.render import render

REWARD_PART = re.compile(r"reward/(?!mean$|std$)([^/]+)/mean")
HELDOUT = re.compile(r"eval/(?:(.+)/)?(?:reward_mean|cross_entropy)")
REDRAW_S = 1.0
"""Least time between two drawings: each is sent to the browser whole [s]."""


def picture(title: str, lines: Sequence[Mapping[str, float | None]], *, status: str = "") -> str:
    """Return HTML of the curves that a run has. lines: metrics by name, with the update as `step`."""
    names = list(dict.fromkeys(name for line in lines for name in line))
    parts = {match[1]: name for name in names if (match := REWARD_PART.fullmatch(name))}
    reward = {"reward": "reward/mean", **(parts if len(parts) > 1 else {})}
    heldout = {match[1] or "held out": name for name in names if (match := HELDOUT.fullmatch(name))}
    charts = [
        Chart(title="Mean reward", curves=_curves(lines, reward)),
        Chart(title="Held out", curves=_curves(lines, heldout)),
        Chart(title="Loss on demonstrations", curves=_curves(lines, {"loss": "loss/demonstrations"})),
        Chart(title="Length", unit="tokens", curves=_curves(lines, {"length": "rollout/sampled_tokens_mean"})),
        Chart(
            title="Engine against trainer: KL",
            unit="nats per token",
            is_log=True,
            curves=_curves(lines, {"kl": "rollout_correction/kl"}),
        ),
    ]
    visible = [chart for chart in charts if not chart.is_empty]
    return render("notebook.html.jinja", title=title, status=status, charts=visible)


def _curves(lines: Sequence[Mapping[str, float | None]], names: Mapping[str, str]) -> list[Curve]:
    return [
        Curve(
            name=label, points=[(line["step"] or 0.0, value) for line in lines if (value := line.get(name)) is not None]
        )
        for label, name in names.items()
    ]


class LivePicture:
    """The curves of the run that trains, in one output that is drawn again as updates are made."""

    def __init__(self, *, total: int) -> None:
        """total: updates of the run."""
        self._total = total
        self._lines: list[Mapping[str, float]] = []
        self._output: Any = None
        self._drawn_s = 0.0

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add the metrics of an update or an evaluation, with the update as `step`, and draw them."""
        self._lines.append(metrics)
        update = round(metrics["step"])
        if update < self._total and time.monotonic() - self._drawn_s < REDRAW_S:
            return
        from IPython.display import HTML, display

        html = HTML(picture("Training", self._lines, status=f"update {update} of {self._total}"))
        if self._output is None:
            self._output = display(html, display_id=True)
        else:
            self._output.update(html)
        self._drawn_s = time.monotonic()
