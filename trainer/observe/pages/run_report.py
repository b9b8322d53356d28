"""Report of a run: one self-contained HTML page, for desktop and phone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from rollout.records import Message, Rollout
from trainer.config.tree import flow, settings
from trainer.objective.mismatch import PREFIX
from trainer.observe.pages.chart import Chart, Curve, Points, legend, number
from trainer.observe.pages.render import render
from trainer.observe.saved_run import SavedRun
from trainer.observe.transcript import content_text, shortened, tool_calls

TEMPLATE = "report.html.jinja"
SHOWN_ROLLOUTS = 3
"""Number of worst rollouts, and of best ones."""
MAX_MESSAGE_CHARS = 6000
STAGES = ("rollout", "reward", "score", "update", "sync")
"""Stages in `time/*`, in the order of a step."""


def write_report(run: SavedRun, path: Path) -> None:
    """Write the report. Raises OSError if the path cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(report(run), encoding="utf-8")


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
        rollouts=[("worst", [shown(r) for r in worst]), ("best", [shown(r) for r in best])],
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
        changed = " with changes" if run.provenance["code"].get("is_changed") else ""
        yield f"commit {commit[:10]}{changed}"


def tiles(run: SavedRun) -> Iterator[tuple[str, str]]:
    """Yield name and value of the headline numbers."""
    last = run.lines[-1]["step"] if run.lines else 0
    yield "updates", f"{last:g} of {run.setting('updates')}"
    rewards = run.values("reward/mean")
    if rewards:
        yield "reward, first → last", f"{number(rewards[0])} → {number(rewards[-1])}"
    held_out = run.values("eval/reward_mean")
    if held_out:
        yield "held out, last", number(held_out[-1])
    seconds = sum(run.values("time/step"))
    if seconds:
        yield "time in steps", str(timedelta(seconds=round(seconds)))
    sampled = sum(run.values("rollout/sampled_tokens"))
    if sampled:
        yield "sampled tokens", f"{sampled:,.0f}"
        if seconds:
            yield "tokens per second", number(sampled / seconds)
    kl = run.values(PREFIX + "kl")
    if kl:
        yield "|kl|, largest", number(max(map(abs, kl)))
    match = run.values("rollout/token_match_rate")
    if match:
        yield "token match, smallest", number(min(match))


def learning_charts(run: SavedRun) -> Iterator[Chart]:
    """Yield charts of reward, text and optimization."""
    series = run.series
    deviations = dict(series("reward/std"))
    rewards = series("reward/mean")
    band = [deviations.get(update, 0.0) for update, _ in rewards]
    yield Chart(
        title="Reward",
        curves=[
            Curve(name="mean", points=rewards, band=band),
            *(Curve(name=name, points=series(metric)) for name, metric in run.evaluations()),
        ],
        limits=(0.0, None),
        note="band: one standard deviation over the rollouts of the step",
    )
    yield Chart(
        title="Length",
        unit="tokens",
        curves=[
            Curve(name="mean", points=series("rollout/sampled_tokens_mean")),
            Curve(name="longest", points=series("rollout/sampled_tokens_max")),
        ],
        limits=(0.0, None),
    )
    yield Chart(
        title="How episodes end",
        unit="share",
        curves=[
            Curve(name=name.replace("_", " "), points=_unless_zero(series(f"rollout/{name}_fraction")))
            for name in ("completed", "max_turns", "truncated", "context_full", "failed")
        ],
        limits=(0.0, 1.0),
    )
    yield Chart(title="Turns", curves=[Curve(name="per rollout", points=series("rollout/turns"))], limits=(0.0, None))
    yield Chart(
        title="Entropy", unit="nats", curves=[Curve(name="policy", points=series("policy/entropy"))], limits=(0.0, None)
    )
    yield Chart(
        title="Gradient norm",
        curves=[Curve(name="before clipping", points=series("optim/grad_norm"))],
        limits=(0.0, None),
    )
    yield Chart(
        title="KL from the reference",
        unit="nats per rollout",
        curves=[Curve(name="kl", points=series("objective/kl"))],
        limits=(0.0, None),
    )
    yield Chart(
        title="Value function",
        curves=[Curve(name="explained variance", points=series("value/explained_variance"))],
        limits=(None, 1.0),
    )


def mismatch_charts(run: SavedRun) -> Iterator[Chart]:
    """Yield charts of engine against trainer on the same tokens, and of the correction."""

    def series(name: str) -> Points:
        return run.series(PREFIX + name)

    alarm = run.setting("correction.alarm_kl")
    updates = [update for update, _ in series("kl")]
    yield Chart(
        title="|kl|",
        unit="nats per token",
        is_log=True,
        curves=[
            Curve(name="engine against trainer", points=series("kl")),
            Curve(name="noise floor", points=series("noise_floor_kl"), is_dashed=True),
            Curve(
                name="alarm", points=[(u, alarm) for u in (updates[0], updates[-1])] if updates else (), is_dashed=True
            ),
        ],
    )
    yield Chart(
        title="k3",
        unit="nats per token",
        is_log=True,
        curves=[
            Curve(name="engine against trainer", points=series("k3_kl")),
            Curve(name="noise floor", points=series("noise_floor_k3"), is_dashed=True),
        ],
        note="noise floor: the trainer against itself in another packing; zero is drawn at the bottom",
    )
    yield Chart(
        title="|Δ log π|",
        unit="nats",
        is_log=True,
        curves=[
            Curve(name="largest", points=series("logp_diff_abs_max")),
            Curve(name="mean", points=series("logp_diff_abs_mean")),
        ],
    )
    yield Chart(
        title="Effective sample size",
        unit="share of tokens",
        curves=[
            Curve(name="after correction", points=series("ess")),
            Curve(name="raw", points=series("raw_ess"), is_dashed=True),
        ],
        limits=(0.0, 1.0),
    )
    yield Chart(
        title="Clipped weights",
        unit="share of tokens",
        curves=[Curve(name="clipped", points=series("clipped_frac"))],
        limits=(0.0, None),
    )
    yield Chart(
        title="Canary after each sync",
        unit="nats",
        is_log=True,
        curves=[Curve(name="largest |Δ log π|", points=run.series("sync/canary_abs_diff"))],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Time of a stage over the whole run."""

    name: str
    seconds: float
    share: float
    color: int


def stages(run: SavedRun) -> list[Stage]:
    """Return the stages in order; the remaining time is `other`."""
    total = sum(run.values("time/step"))
    if not total:
        return []
    seconds = {name: sum(run.values(f"time/{name}")) for name in STAGES}
    seconds["other"] = max(0.0, total - sum(seconds.values()))
    return [
        Stage(name=name, seconds=value, share=value / total, color=index)
        for index, (name, value) in enumerate(seconds.items())
        if value
    ]


def stage_chart(run: SavedRun) -> Chart:
    return Chart(
        title="Seconds per step",
        unit="s",
        curves=[Curve(name=name, points=run.series(f"time/{name}")) for name in STAGES],
        limits=(0.0, None),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownMessage:
    role: str
    text: str
    calls: Sequence[str]
    errors: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRollout:
    rollout: Rollout
    reward: str
    rewards: Mapping[str, str]
    messages: Sequence[ShownMessage]


def shown(rollout: Rollout) -> ShownRollout:
    return ShownRollout(
        rollout=rollout,
        reward=number(rollout.reward),
        rewards={name: number(value) for name, value in rollout.rewards.items()},
        messages=[_message(message) for message in rollout.messages],
    )


def _message(message: Message) -> ShownMessage:
    errors: Any = message.get("tool_call_errors") or ()
    return ShownMessage(
        role=str(message["role"]),
        text=shortened(content_text(message), MAX_MESSAGE_CHARS),
        calls=[shortened(call, MAX_MESSAGE_CHARS) for call in tool_calls(message)],
        errors=[str(error) for error in errors],
    )


def _unless_zero(points: Points) -> Points:
    """Return the points, or none if all are zero."""
    return points if any(value for _, value in points) else ()
