"""Report of a run: one self-contained HTML page, for desktop and phone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from statistics import fmean

from lockstep.lab.pages.chart import Chart, Curve, legend, number
from lockstep.lab.pages.render import render, write_page
from lockstep.lab.pages.saved_run import SavedRun
from lockstep.trainer.config.tree import flow, settings
from lockstep.trainer.objective.correction.mismatch import PREFIX
from lockstep.trainer.observe.alarms import DROPPED
from lockstep.trainer.observe.transcript import content_text, parts, shortened, tool_calls

TEMPLATE = "report.html.jinja"
SHOWN_ROLLOUTS = 3
"""Number of worst rollouts, and of best ones."""
AVERAGED = 5
"""Largest number of updates in the first and the last reward: a single one is noisy."""
MAX_MESSAGE_CHARS = 6000
STAGES = ("rollout", "reward", "teacher", "data", "score", "update", "sync")
"""Stages in `time/*`, in the order of a step."""


def write_report(run: SavedRun, path: Path) -> None:
    """Write the report. Raises OSError if the path cannot be written; an older report is then kept."""
    write_page(path, report(run))


def report(run: SavedRun) -> str:
    """Return the page as HTML."""
    worst, best = run.extremes(SHOWN_ROLLOUTS)
    alarms = run.alarms()
    return render(
        TEMPLATE,
        run=run,
        facts=list(facts(run)),
        tiles=list(tiles(run)),
        alarms=alarms,
        still=[span for span in alarms if run.lines and span.last == run.lines[-1]["step"]],
        learning=[chart for chart in learning_charts(run) if not chart.is_empty],
        mismatch=[chart for chart in mismatch_charts(run) if not chart.is_empty],
        legend=legend,
        stages=stages(run),
        stage_chart=stage_chart(run),
        rollouts=[("worst", worst), ("best", best)],
        number=number,
        clipped=lambda text: shortened(text, MAX_MESSAGE_CHARS),
        content_text=content_text,
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
    seconds = sum(run.values("time/step"))
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


def learning_charts(run: SavedRun) -> Iterator[Chart]:
    """Yield charts of reward, text and optimization."""
    deviations = dict(run.series("reward/std"))
    rewards = run.series("reward/mean")
    yield Chart(
        title="Reward",
        curves=[
            Curve(name="mean", points=rewards, band=[deviations.get(update, 0.0) for update, _ in rewards]),
            *curves(run, dict(run.evaluations())),
        ],
        limits=(0.0, None),
        note="band: one standard deviation over the rollouts of the step",
    )
    lengths = {"mean": "rollout/sampled_tokens_mean", "longest": "rollout/sampled_tokens_max"}
    yield Chart(title="Length", unit="tokens", curves=curves(run, lengths), limits=(0.0, None))
    statuses = ("completed", "max_turns", "truncated", "context_full", "failed")
    ends = curves(run, {name.replace("_", " "): f"rollout/{name}_fraction" for name in statuses})
    end_curves = [curve for curve in ends if any(value for _, value in curve.points)]
    yield Chart(title="How episodes end", unit="share", curves=end_curves, limits=(0.0, 1.0))
    causes = sorted({name for line in run.lines for name, count in line.items() if name.startswith(DROPPED) and count})
    drops = {name.removeprefix(DROPPED): name for name in causes if name != f"{DROPPED}fraction"}
    yield Chart(title="Rollouts that are not trained", unit="", curves=curves(run, drops), limits=(0.0, None))
    for title, unit, name, metric, limits in (
        ("Turns", "", "per rollout", "rollout/turns", (0.0, None)),
        ("Entropy", "nats", "policy", "policy/entropy", (0.0, None)),
        ("Gradient norm", "", "before clipping", "optim/grad_norm", (0.0, None)),
        ("KL from the reference", "nats per rollout", "kl", "objective/kl", (0.0, None)),
        ("Value function", "", "explained variance", "value/explained_variance", (None, 1.0)),
        ("Load-balancing loss", "", "before its weight", "router/aux_loss", (0.0, None)),
        ("Unused experts", "", "over all layers", "router/unused_experts", (0.0, None)),
    ):
        yield Chart(title=title, unit=unit, curves=curves(run, {name: metric}), limits=limits)
    loads = {"busiest expert": "router/load_max", "standard deviation": "router/load_cv"}
    yield Chart(
        title="Load of experts",
        unit="mean loads",
        curves=curves(run, loads),
        limits=(0.0, None),
        note="trained tokens per expert, in the worst layer",
    )
    levels = {"unseen": "unseen", "too hard": "too_hard", "in between": "between", "solved": "solved"}
    yield Chart(
        title="Difficulty of the data",
        unit="share of rows",
        curves=curves(run, {name: f"data/{level}_share" for name, level in levels.items()}),
        limits=(0.0, 1.0),
        note="by the pass rate of each row in the window of the curriculum",
    )


def mismatch_charts(run: SavedRun) -> Iterator[Chart]:
    """Yield charts of engine against trainer on the same tokens, and of the correction."""
    kl = curves(run, {"engine against trainer": PREFIX + "kl"})
    kl += curves(run, {"noise floor": PREFIX + "noise_floor_kl"}, is_dashed=True)
    threshold = run.thresholds().kl
    if kl[0].points and math.isfinite(threshold):
        ends = (kl[0].points[0][0], kl[0].points[-1][0])
        kl.append(Curve(name="alarm", points=[(update, threshold) for update in ends], is_dashed=True))
    yield Chart(title="|kl|", unit="nats per token", is_log=True, curves=kl)
    yield Chart(
        title="k3",
        unit="nats per token",
        is_log=True,
        curves=curves(run, {"engine against trainer": PREFIX + "k3_kl"})
        + curves(run, {"noise floor": PREFIX + "noise_floor_k3"}, is_dashed=True),
        note="noise floor: the trainer against itself in another packing; zero is drawn at the bottom",
    )
    differences = {"largest": PREFIX + "logp_diff_abs_max", "mean": PREFIX + "logp_diff_abs_mean"}
    yield Chart(title="|Δ log π|", unit="nats", is_log=True, curves=curves(run, differences))
    yield Chart(
        title="Effective sample size",
        unit="share of tokens",
        curves=curves(run, {"after correction": PREFIX + "ess"})
        + curves(run, {"raw": PREFIX + "raw_ess"}, is_dashed=True),
        limits=(0.0, 1.0),
    )
    clip_curves = curves(run, {"clipped": PREFIX + "clipped_frac"})
    yield Chart(title="Clipped weights", unit="share of tokens", curves=clip_curves, limits=(0.0, None))
    flip_curves = curves(run, {"flipped": "router/flipped_frac"})
    yield Chart(
        title="Flipped routes",
        unit="share of (layer, token)",
        curves=flip_curves,
        limits=(0.0, None),
        note="sets of experts that the trainer's routers would not have chosen",
    )
    canary = curves(run, {"largest |Δ log π|": "sync/canary_abs_diff"})
    yield Chart(title="Canary after each sync", unit="nats", is_log=True, curves=canary)


def curves(run: SavedRun, metrics: Mapping[str, str], *, is_dashed: bool = False) -> list[Curve]:
    """Return the curves of metrics given by curve name."""
    return [Curve(name=name, points=run.series(metric), is_dashed=is_dashed) for name, metric in metrics.items()]


def stages(run: SavedRun) -> dict[str, float]:
    """Return the seconds of each stage over the run, in order; the remaining time is `other`."""
    seconds = {name: sum(run.values(f"time/{name}")) for name in STAGES}
    seconds["other"] = max(0.0, sum(run.values("time/step")) - sum(seconds.values()))
    return {name: value for name, value in seconds.items() if value}


def stage_chart(run: SavedRun) -> Chart:
    return Chart(
        title="Seconds per step",
        unit="s",
        curves=curves(run, {name: f"time/{name}" for name in STAGES}),
        limits=(0.0, None),
    )
