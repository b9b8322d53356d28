"""Judgment of a run of a recipe: the evaluated value with its interval, against the published one, and the curve.

Reads only the run directory: metrics.jsonl and evaluations/. Intervals are those of `trainer/evaluate/estimates.py`.
The verdict is by the value, not by the interval: the sentence says where the interval crosses the bounds.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from lockstep.rollout.errors import DataError
from lockstep.scripts.recipes.declared import Bound, Recipe
from lockstep.trainer.checkpoint.run_dir import RunDirectory
from lockstep.trainer.evaluate import estimates
from lockstep.trainer.evaluate.estimates import Estimate
from lockstep.trainer.evaluate.results import SetResult, read_results, title
from lockstep.trainer.observe.metrics_log import read_metrics


class Status(StrEnum):
    REPRODUCED = "reproduced"
    """The value is within the tolerance of the published one, and no measured point is off the curve."""
    BELOW = "below"
    ABOVE = "above"
    """Further from the published value than the tolerance; not a reproduction either: the task may be easier."""
    OFF_CURVE = "off the curve"
    """The value is within the tolerance, and an earlier point of the run is outside of its bounds."""
    INTERRUPTED = "interrupted"
    """The run has not made all of its updates."""
    MISSING = "not evaluated"
    """All updates are made, and the evaluation that is to be judged is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A bound of the curve, and the value of the run."""

    bound: Bound
    value: float | None
    """None if the run has no such metric at this update."""

    @property
    def is_off(self) -> bool:
        return self.value is not None and not self.bound.low <= self.value <= self.bound.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    recipe: str
    status: Status
    sentence: str
    metric: str
    published: float
    tolerance: float
    value: float | None = None
    low: float | None = None
    """Bounds of the 95 % interval."""
    high: float | None = None
    judged_update: int | None = None
    updates: int
    """Number of updates of the recipe."""
    points: tuple[Point, ...] = ()

    @property
    def passes(self) -> bool:
        return self.status is Status.REPRODUCED


def judge(recipe: Recipe, run: Path, *, updates: int) -> Verdict:
    """Judge a run. Raises `DataError` for damaged files, `ConfigError` for a directory without metrics."""
    directory = RunDirectory(run)
    lines = read_metrics(directory.metrics) if directory.metrics.is_file() else []
    last = max((int(line["step"]) for line in lines), default=0)
    results = evaluations(recipe, directory.evaluations)
    points = tuple(Point(bound=bound, value=value_at(lines, bound)) for bound in recipe.curve)

    def verdict(status: Status, sentence: str, estimate: Estimate | None = None, at: int | None = None) -> Verdict:
        values = {} if estimate is None else {"value": estimate.value, "low": estimate.low, "high": estimate.high}
        return Verdict(
            recipe=recipe.name,
            status=status,
            sentence=sentence,
            metric=recipe.metric,
            published=recipe.published,
            tolerance=recipe.tolerance,
            judged_update=at,
            updates=updates,
            points=points,
            **values,
        )

    if last < updates:
        return verdict(
            Status.INTERRUPTED,
            f"found {last} of {updates} updates, expected all; type make reproduce RECIPE={recipe.name} again to "
            "continue",
        )
    if updates not in results:
        return verdict(
            Status.MISSING,
            f"found evaluations at updates {', '.join(map(str, results)) or 'none'}, expected one at {updates} in "
            f"{directory.evaluations}; type make reproduce RECIPE={recipe.name} to evaluate",
        )
    at = updates if recipe.at == "last" else max(results, key=lambda update: results[update].value)
    return verdict(*_decide(recipe, results[at], at, points), results[at], at)


def _decide(recipe: Recipe, estimate: Estimate, at: int, points: Sequence[Point]) -> tuple[Status, str]:
    low, high = recipe.published - recipe.tolerance, recipe.published + recipe.tolerance
    value = round(estimate.value, 9)  # 0.503 is within 0.543 - 0.04, which is 0.50300000000000005
    status = Status.BELOW if value < round(low, 9) else Status.ABOVE if value > round(high, 9) else Status.REPRODUCED
    sentence = f"{recipe.metric} is {estimate} at update {at}, expected {low:.3f} to {high:.3f}"
    if estimate.low < low < estimate.high or estimate.low < high < estimate.high:
        sentence += "; the interval crosses a bound, so that another seed may decide otherwise"
    off = [point for point in points if point.is_off]
    for point in off:
        bound = point.bound
        sentence += (
            f"; {bound.metric} is {point.value:.3f} at update {bound.update}, expected {bound.low} to {bound.high}"
        )
    return Status.OFF_CURVE if off and status is Status.REPRODUCED else status, sentence


def evaluations(recipe: Recipe, directory: Path) -> dict[int, Estimate]:
    """Return the judged measure of each evaluation of a run, by update. Raises `DataError` for other files."""
    files = sorted(directory.glob("update-*.json"))
    return {int(file.stem.partition("-")[2]): measure(recipe, read_results(file, {}), file) for file in files}


def measure(recipe: Recipe, results: Sequence[SetResult], file: Path) -> Estimate:
    """Return the recipe's measure with its interval. Raises `DataError` without the set or a part of it."""
    sets = {result.name: result for result in results}
    result = sets.get(recipe.heldout)
    if result is None:
        there = ", ".join(map(title, sets)) or "none"
        raise DataError(
            f"{file}: found {there}, expected results of {title(recipe.heldout)}; delete it to evaluate again"
        )
    if not recipe.parts:
        return result.rewards() if recipe.measure == "reward_mean" else result.pass_rates()[1]
    parts = result.by_label()
    lacking = [name for name in recipe.parts if name not in parts]
    if lacking:
        raise DataError(
            f"{file}: found no rows of {', '.join(lacking)}, expected {', '.join(recipe.parts)}; evaluate with "
            "eval.prompts=null and the eval.by of the experiment"
        )
    rewards = [[prompt.mean_reward for prompt in parts[name].prompts] for name in recipe.parts]
    value = statistics.fmean(map(statistics.fmean, rewards))
    # The parts are independent samples, each with the same weight.
    half = estimates.Z_95 * math.sqrt(sum(estimates.standard_error(part) ** 2 for part in rewards)) / len(rewards)
    return Estimate(value=value, low=value - half, high=value + half)


def value_at(lines: Sequence[Mapping[str, float | None]], bound: Bound) -> float | None:
    """Return the metric at the update of a bound; None if it was not written there."""
    values = [
        line[bound.metric] for line in lines if line["step"] == bound.update and line.get(bound.metric) is not None
    ]
    return values[-1] if values else None


def page(recipe: Recipe, verdict: Verdict) -> str:
    """Return the verdict as Markdown."""
    interval = "–" if verdict.value is None else f"{verdict.value:.3f} [{verdict.low:.3f}, {verdict.high:.3f}]"
    rows = [
        f"# {recipe.title}: {verdict.status}",
        "",
        f"Verdict: {verdict.sentence}.",
        "",
        "| | |",
        "|---|---|",
        f"| metric | `{verdict.metric}`, the {recipe.at} evaluation |",
        f"| this run | {interval} |",
        f"| published | {recipe.published:g} ± {recipe.tolerance:g} |",
        f"| source | {recipe.source} |",
        *(f"| | {link} |" for link in recipe.links),
    ]
    if verdict.points:
        rows += ["", "| update | metric | expected | this run | source |", "|---|---|---|---|---|"]
    for point in verdict.points:
        bound = point.bound
        value = "not measured" if point.value is None else f"{point.value:.3f}" + (" (outside)" if point.is_off else "")
        rows.append(
            f"| {bound.update} | `{bound.metric}` | {bound.low:g} to {bound.high:g} | {value} | {bound.found} |"
        )
    return "\n".join(rows) + "\n"


def write_verdict(recipe: Recipe, verdict: Verdict, run: Path) -> Path:
    """Write verdict.json and verdict.md into the run directory; return the page."""
    (run / "verdict.json").write_text(json.dumps(asdict(verdict), indent=1) + "\n", encoding="utf-8")
    target = run / "verdict.md"
    target.write_text(page(recipe, verdict), encoding="utf-8")
    return target
