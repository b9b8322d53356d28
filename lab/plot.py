"""Curves of runs as one picture, by matplotlib (`lockstep plot`)."""

from __future__ import annotations

import difflib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from lockstep.rollout.errors import ConfigError
from lockstep.rollout.system.plain_files import behind_link, own_output, write_whole
from lockstep.trainer.observe.metrics_log import read_metrics

MISMATCH: Sequence[tuple[str, str, Literal["-", ":"]]] = (
    ("rollout_correction/logp_diff_abs_max", "largest |Δ logp| of a token", "-"),
    ("rollout_correction/kl", "|kl|", ":"),
)
"""Mismatch metrics with labels and styles of their lines."""
EXPECTED_KL, CRITICAL_KL = 0.01, 0.1
"""Below the first (dashed) training is on policy, above the second it breaks."""
NEAREST = 3
"""Names offered in place of an unknown metric."""

NamedLines = tuple[str, list[dict[str, float]]]
"""Name of a run, and its metrics by step."""


def plot_runs(runs: Sequence[Path], metrics: Sequence[str] | None, out: Path | None) -> Path:
    """Draw reward and mismatch, or metrics by name, and return the picture.

    Args:
        metrics: one panel each; None: reward and mismatch.
        out: PNG or SVG; None: a PNG in the first run.

    Raises `LockstepError`, also for a metric that no run has, OSError, and ValueError for an unknown format.
    """
    matplotlib.rcParams["text.parse_math"] = False  # names of runs and metrics are text
    runs = [behind_link(run) for run in runs]
    figure = curves_of([(run.resolve().name, read_metrics(run / "metrics.jsonl")) for run in runs], metrics)
    out = out or own_output(runs[0] / ("metrics.png" if metrics else "curves.png"))
    picture = io.BytesIO()
    figure.savefig(picture, dpi=140, format=out.suffix.removeprefix(".") or "png")
    write_whole(out, picture.getvalue())
    return out


def curves_of(runs: Sequence[NamedLines], metrics: Sequence[str] | None) -> Figure:
    """Draw the curves of `plot_runs`. Raises `ConfigError` for a metric that no run has."""
    if metrics:
        _refuse_unknown(metrics, runs)
    figure = _metrics(runs, metrics) if metrics else _reward_and_mismatch(runs)
    for panel in figure.axes:
        panel.set_xlabel("update")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        panel.grid(alpha=0.25)
    return figure


def _refuse_unknown(metrics: Sequence[str], runs: Sequence[NamedLines]) -> None:
    names = sorted({name for _, lines in runs for line in lines for name, value in line.items() if value is not None})
    for metric in metrics:
        if metric not in names:
            near = ", ".join(difflib.get_close_matches(metric, names, n=NEAREST, cutoff=0.5))
            hint = f"near: {near}" if near else "metrics.jsonl lists all"
            raise ConfigError(f"no run has a value of the metric {metric}; {hint}")


def _metrics(runs: Sequence[NamedLines], metrics: Sequence[str]) -> Figure:
    figure = Figure(figsize=(3.4 * len(metrics), 2.8), layout="constrained")
    panels = figure.subplots(1, len(metrics), squeeze=False)
    for panel, metric in zip(panels[0], metrics, strict=True):
        for number, (_, lines) in enumerate(runs):
            _draw(panel, _series(lines, metric), color=f"C{number}")
        panel.set(title=metric)
    _name_runs(figure, runs)
    return figure


def _reward_and_mismatch(runs: Sequence[NamedLines]) -> Figure:
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    reward, mismatch = figure.subplots(1, 2)
    rewards, differences = [], []
    for number, (_, lines) in enumerate(runs):
        series = _series(lines, "reward/mean")
        rewards += series[1]
        _draw(reward, series, color=f"C{number}")
        for metric, _, style in MISMATCH:
            updates, values = _series(lines, metric)
            differences += map(abs, values)
            _draw(mismatch, (updates, [abs(value) for value in values]), color=f"C{number}", linestyle=style)
    reward.set(ylabel="mean reward")
    if all(0 <= value <= 1 for value in rewards):
        reward.set_ylim(0, 1.02)
    mismatch.axhline(EXPECTED_KL, color="0.5", linestyle="--", linewidth=1)
    mismatch.axhline(CRITICAL_KL, color="0.5", linewidth=1)
    mismatch.set(ylabel="engine against trainer [nats]", yscale="log", ylim=(None, 2 * max([0.5, *differences])))
    mismatch.yaxis.set_major_formatter(lambda value, place: f"{value:g}")  # the default writes formulas
    for level, text in ((EXPECTED_KL, " on policy below"), (CRITICAL_KL, " critical above")):
        mismatch.annotate(text, (1, level), xycoords=("axes fraction", "data"), va="center", fontsize=8)
    color = "C0" if len(runs) == 1 else "0.3"
    styles = [Line2D([], [], color=color, linestyle=style, label=label) for _, label, style in MISMATCH]
    mismatch.legend(handles=styles, frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    _name_runs(figure, runs)
    return figure


def _draw(panel: Axes, series: tuple[list[float], list[float]], *, color: str, linestyle: str = "-") -> None:
    marker = "o" if len(series[0]) == 1 else None  # a line of one point is invisible
    panel.plot(*series, color=color, linestyle=linestyle, linewidth=1.5, marker=marker, markersize=4)


def _name_runs(figure: Figure, runs: Sequence[NamedLines]) -> None:
    """Write the names of several runs below the panels, off their lines."""
    if len(runs) > 1:
        lines = [Line2D([], [], color=f"C{number}", label=name) for number, (name, _) in enumerate(runs)]
        figure.legend(handles=lines, frameon=False, fontsize=8, loc="outside lower center", ncols=4)


def _series(lines: Sequence[Mapping[str, float]], name: str) -> tuple[list[float], list[float]]:
    points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]
