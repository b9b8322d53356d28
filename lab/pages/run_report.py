"""Report of a run: one self-contained HTML page, for desktop and phone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import fmean

from lockstep.lab.pages.chart import Chart, Curve, legend, number
from lockstep.lab.pages.ledger import ledger
from lockstep.lab.pages.panels import SECTIONS, Panel
from lockstep.lab.pages.render import render, write_page
from lockstep.lab.pages.saved_run import SavedRun
from lockstep.lab.pages.thumbnails import Thumbnails, saved_image
from lockstep.trainer.config.tree import flow, settings
from lockstep.trainer.objective.correction.modes import PREFIX
from lockstep.trainer.observe.transcript import parts, shortened, tool_calls

TEMPLATE = "report.html.jinja"
SHOWN_ROLLOUTS = 3
"""Number of worst rollouts, and of best ones."""
AVERAGED = 5
"""Largest number of updates in the first and the last reward: a single one is noisy."""
MAX_MESSAGE_CHARS = 6000
STEP = "time/step"
STAGES = tuple(
    curve
    for panel in SECTIONS["Speed"]
    if STEP in panel.curves.values()
    for curve, metric in panel.curves.items()
    if metric != STEP
)
"""Stages in `time/*`, in the order of a step."""


def write_report(run: SavedRun, path: Path) -> None:
    """Write the report. Raises OSError if the path cannot be written; an older report is then kept."""
    write_page(path, report(run))


def report(run: SavedRun) -> str:
    """Return the page as HTML."""
    worst, best = run.extremes(SHOWN_ROLLOUTS)
    alarms = run.alarms()
    thumbnails = Thumbnails(partial(saved_image, run.media))
    for message in (message for rollout in (*worst, *best) for message in rollout.messages):
        thumbnails.pieces(message)  # before the page writes its styles
    return render(
        TEMPLATE,
        run=run,
        facts=list(facts(run)),
        tiles=list(tiles(run)),
        alarms=alarms,
        still=[span for span in alarms if run.lines and span.last == run.lines[-1]["step"]],
        ledger=ledger(run.setting, lambda metric: [line[metric] for line in run.lines if metric in line]),
        sections=charts(run),
        legend=legend,
        stages=stages(run),
        rollouts=[("worst", worst), ("best", best)],
        number=number,
        clipped=lambda text: shortened(text, MAX_MESSAGE_CHARS),
        thumbnails=thumbnails,
        parts=parts,
        tool_calls=tool_calls,
        settings=settings(run.config),
        flow=flow,
    )


def facts(run: SavedRun) -> Iterator[str]:
    """Yield the key settings of the run."""
    yield str(run.setting("model.path"))
    yield f"{run.setting('algorithm.name')}, correction {run.setting('correction.mode')}"
    yield str(run.setting("model.dtype"))
    prompts, samples = run.setting("rollout.prompts_per_step"), run.setting("rollout.samples_per_prompt")
    yield f"{prompts} prompts x {samples} samples"
    yield str(run.setting("data.path"))
    commit = run.provenance.get("code", {}).get("commit")
    if commit:
        suffix = " with changes" if run.provenance["code"].get("is_changed") else ""
        yield f"commit {commit[:10]}{suffix}"
    for path, update in run.changed_files.items():
        yield f"{Path(path).name} changed after update {update}"


def tiles(run: SavedRun) -> Iterator[tuple[str, str]]:
    """Yield name and value of the headline numbers."""
    last = run.lines[-1]["step"] if run.lines else 0
    yield "updates", f"{last:g} of {run.setting('updates')}"
    rewards = run.values("reward/mean")
    few = min(AVERAGED, len(rewards) // 2)
    if few > 1:
        first, last = fmean(rewards[:few]), fmean(rewards[-few:])
        yield f"reward, mean of first {few} → last {few}", f"{number(first)} → {number(last)}"
    elif rewards:
        yield "reward, first → last", f"{number(rewards[0])} → {number(rewards[-1])}"
    held_out = run.series("eval/reward_mean")
    if len(held_out) > 1 and held_out[0][0] == 0:  # measured before training
        yield "held out, before → last", f"{number(held_out[0][1])} → {number(held_out[-1][1])}"
    elif held_out:
        yield "held out, last", number(held_out[-1][1])
    seconds = sum(run.values(STEP))
    if seconds:
        yield "time in steps", duration(seconds)
    num_sampled = sum(run.values("rollout/sampled_tokens"))
    if num_sampled:
        yield "sampled tokens", f"{num_sampled:,.0f}"
        if seconds:
            yield "tokens per second", number(num_sampled / seconds)
    kl = run.values(PREFIX + "kl")
    if kl:
        yield "|kl|, largest", number(max(map(abs, kl)))
    match = run.values("rollout/token_match_rate")
    if match:
        yield "token match, smallest", number(min(match))


def duration(seconds: float) -> str:
    """Format as days, hours, minutes and seconds; in seconds if it is longer than any run."""
    is_possible = abs(seconds) < timedelta.max.total_seconds()
    return str(timedelta(seconds=round(seconds))) if is_possible else f"{number(seconds)} s"


def charts(run: SavedRun) -> dict[str, list[Chart]]:
    """Return the curated charts of each section that the run has numbers for."""
    names = {name for line in run.lines for name in line}
    return {
        section: [chart for panel in panels if not (chart := _chart(run, panel, names)).is_empty]
        for section, panels in SECTIONS.items()
    }


def _chart(run: SavedRun, panel: Panel, names: set[str]) -> Chart:
    curves = []
    for curve, metric in panel.metrics(names).items():
        points = run.series(metric)
        if panel.hides_zeros and not any(value for _, value in points):
            continue
        half_widths = dict(run.series(panel.band)) if panel.band and not curves else None
        band = None if half_widths is None else [half_widths.get(update, 0.0) for update, _ in points]
        curves.append(Curve(name=curve, points=points, band=band, is_dashed=curve in panel.dashed))
    if panel.threshold and curves and curves[0].points:
        limit = getattr(run.thresholds(), panel.threshold)
        ends = (curves[0].points[0][0], curves[0].points[-1][0])
        if math.isfinite(limit):
            curves.append(Curve(name="alarm", points=[(update, limit) for update in ends], is_dashed=True))
    band_note = " Band: one standard deviation over the rollouts of the step." if panel.band else ""
    return Chart(
        title=panel.title,
        curves=curves,
        unit=panel.unit,
        is_log=panel.is_log,
        limits=panel.limits,
        note=panel.meaning + band_note,
    )


def stages(run: SavedRun) -> dict[str, float]:
    """Return the seconds of each stage over the run, in order; the remaining time is `other`."""
    seconds = {name: sum(run.values(f"time/{name}")) for name in STAGES}
    seconds["other"] = max(0.0, sum(run.values(STEP)) - sum(seconds.values()))
    return {name: value for name, value in seconds.items() if value}
