"""Curves of both sides over several seeds: kept in a JSON file after each seed, and drawn as a picture.

The file holds the settings of the comparison. A comparison that was ended goes on at its first missing seed, and one
with other settings is refused.
"""

from __future__ import annotations

import io
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.rollout.errors import ConfigError
from lockstep.rollout.system.plain_files import own_output, write_whole

COLORS = {"lockstep": "#1f77b4", "trl": "#d95f02"}
LABELS = {"lockstep": "Lockstep", "trl": "TRL 1.16"}

Curve = Sequence[tuple[float, float]]
"""(seconds since the start of the first update, mean reward) of each update."""


class CurveFile:
    """Results by seed, written after each."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Raises `ConfigError` if the file has curves of other settings."""
        self._path = own_output(path)
        self._content: dict[str, Any] = {"settings": dict(settings), "facts": {}, "seeds": {}}
        if path.exists():
            there = json.loads(path.read_text())
            if there.get("settings") != self._content["settings"]:
                raise ConfigError(
                    f"{path} has curves of other settings: {there.get('settings')}, expected {dict(settings)}; remove "
                    "it, or choose another --picture"
                )
            self._content = there

    @property
    def facts(self) -> dict[str, Any]:
        """Facts of all seeds: machine, chosen threads, evaluation of the model before training."""
        return self._content["facts"]

    @property
    def seeds(self) -> dict[int, dict[str, Any]]:
        return {int(seed): result for seed, result in self._content["seeds"].items()}

    def missing(self, seeds: Iterable[int]) -> list[int]:
        return [seed for seed in seeds if seed not in self.seeds]

    def note(self, **facts: Any) -> None:
        self.facts.update(facts)
        self._write()

    def add(self, seed: int, result: Mapping[str, Any]) -> None:
        self._content["seeds"][str(seed)] = dict(result)
        self._write()

    def _write(self) -> None:
        write_whole(self._path, (json.dumps(self._content, indent=1) + "\n").encode())


def reward_at(curve: Curve, seconds: float) -> float:
    """Return the reward of the last update finished by then, or of the first update."""
    return next((reward for at, reward in reversed(curve) if at <= seconds), curve[0][1])


def spread(curves: Sequence[Sequence[float]]) -> tuple[list[float], list[float], list[float]]:
    """Return mean, smallest and largest value of each place over the curves, as far as all reach."""
    places = list(zip(*curves, strict=False))
    return [statistics.mean(place) for place in places], [min(place) for place in places], [max(p) for p in places]


def draw(content: CurveFile, out: Path, *, points: int = 200) -> None:
    """Draw reward over wall time and over updates (mean and range of the seeds), and the held-out rewards."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["text.parse_math"] = False
    from matplotlib import pyplot

    figure, (by_time, by_update, heldout) = pyplot.subplots(
        1, 3, figsize=(12, 3.4), layout="constrained", width_ratios=(3, 3, 1.2)
    )
    seeds = content.seeds
    for side, color in COLORS.items():
        curves: list[Curve] = [result[side]["curve"] for result in seeds.values()]
        end = min(curve[-1][0] for curve in curves)
        times = [end * point / points for point in range(points + 1)]
        for panel, xs, values in (
            (by_time, [second / 60 for second in times], [[reward_at(curve, at) for at in times] for curve in curves]),
            (by_update, list(range(1, len(curves[0]) + 1)), [[reward for _, reward in curve] for curve in curves]),
        ):
            mean, low, high = spread(values)
            panel.plot(xs[: len(mean)], mean, color=color, linewidth=1.6, label=LABELS[side])
            panel.fill_between(xs[: len(mean)], low, high, color=color, alpha=0.18, linewidth=0)
        before = content.facts["heldout_before"]
        after = [result[side]["heldout"] for result in seeds.values()]
        mean = statistics.mean(after)
        heldout.plot([0, 1], [before, mean], color=color, linewidth=1.6, marker="o", markersize=4)
        heldout.errorbar([1], [mean], [[mean - min(after)], [max(after) - mean]], color=color, capsize=3)
    by_time.set(xlabel="wall time [min]", ylabel="mean reward of the update's rollouts", ylim=(0, 1.02))
    by_update.set(xlabel="update", ylim=(0, 1.02))
    heldout.set(xticks=[0, 1], xticklabels=["before", "after"], xlim=(-0.3, 1.3), ylim=(0, 1.02))
    heldout.set(ylabel="held-out reward, greedy")
    for panel in (by_time, by_update, heldout):
        panel.grid(alpha=0.25)
    title = f"mean and range of {len(seeds)} seeds" if len(seeds) > 1 else "one seed"
    by_time.legend(frameon=False, fontsize=9, loc="upper right", title=title)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=140, format=out.suffix.removeprefix(".") or "png")
    pyplot.close(figure)
    write_whole(own_output(out), picture.getvalue())
