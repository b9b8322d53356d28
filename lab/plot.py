"""Curves of runs as one picture, by matplotlib (`lockstep plot`)."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib import pyplot
from matplotlib.figure import Figure

from lockstep.rollout.system.plain_files import behind_link, own_output, write_whole
from lockstep.trainer.observe.metrics_log import read_metrics

MISMATCH = (
    ("rollout_correction/logp_diff_abs_max", "largest |Δ logp| of a token"),
    ("rollout_correction/kl", "|kl|"),
)
"""Mismatch metrics with labels. Below the dashed line training is on policy, above the solid one it breaks."""
EXPECTED_KL, CRITICAL_KL = 0.01, 0.1

NamedLines = tuple[str, list[dict[str, float]]]
"""Name of a run, and its metrics by step."""


def plot_runs(runs: Sequence[Path], metrics: Sequence[str] | None, out: Path | None) -> Path:
    """Draw reward and mismatch, or metrics by name, and return the picture.

    Args:
        metrics: one panel each; None: reward and mismatch.
        out: PNG or SVG; None: a PNG in the first run.

    Raises `LockstepError`, OSError, and ValueError for an unknown format.
    """
    matplotlib.use("Agg")
    matplotlib.rcParams["text.parse_math"] = False  # names of runs and metrics are text
    runs = [behind_link(run) for run in runs]
    curves_of_runs = [(run.resolve().name, read_metrics(run / "metrics.jsonl")) for run in runs]
    figure = _metrics(curves_of_runs, metrics) if metrics else _reward_and_mismatch(curves_of_runs)
    out = out or own_output(runs[0] / ("metrics.png" if metrics else "curves.png"))
    picture = io.BytesIO()
    figure.savefig(picture, dpi=140, format=out.suffix.removeprefix(".") or "png")
    write_whole(out, picture.getvalue())
    return out


def _metrics(runs: Sequence[NamedLines], metrics: Sequence[str]) -> Figure:
    figure, panels = pyplot.subplots(
        1, len(metrics), figsize=(3.4 * len(metrics), 2.8), squeeze=False, layout="constrained"
    )
    for panel, metric in zip(panels[0], metrics, strict=True):
        for name, lines in runs:
            panel.plot(*_series(lines, metric), label=name, linewidth=1.4)
        panel.set(title=metric, xlabel="update")
        panel.grid(alpha=0.25)
    panels[0][0].legend(frameon=False)
    return figure


def _reward_and_mismatch(runs: Sequence[NamedLines]) -> Figure:
    figure, (reward, mismatch) = pyplot.subplots(1, 2, figsize=(10, 3.4), constrained_layout=True)
    for name, lines in runs:
        updates, values = _series(lines, "reward/mean")
        (line,) = reward.plot(updates, values, label=name, linewidth=1.6)
        for (metric, label), style in zip(MISMATCH, ("-", ":"), strict=True):
            updates, values = _series(lines, metric)
            mismatch.plot(
                updates,
                [abs(value) for value in values],
                style,
                color=line.get_color(),
                linewidth=1.4,
                label=label if len(runs) == 1 else f"{name}: {label}",
            )
    reward.set(xlabel="update", ylabel="mean reward", ylim=(0, 1.02))
    mismatch.axhline(EXPECTED_KL, color="0.5", linestyle="--", linewidth=1)
    mismatch.axhline(CRITICAL_KL, color="0.5", linewidth=1)
    mismatch.set(xlabel="update", ylabel="engine against trainer [nats]", yscale="log", ylim=(None, 1))
    mismatch.yaxis.set_major_formatter(lambda value, place: f"{value:g}")  # the default writes formulas
    for level, text in ((EXPECTED_KL, "on policy below"), (CRITICAL_KL, "critical above")):
        mismatch.annotate(text, (1, level), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8)
    mismatch.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(0, 0.68))
    for axis in (reward, mismatch):
        axis.grid(alpha=0.25)
    if len(runs) > 1:
        reward.legend(frameon=False, fontsize=8)
    return figure


def _series(lines: Sequence[Mapping[str, float]], name: str) -> tuple[list[float], list[float]]:
    points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]
