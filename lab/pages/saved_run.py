"""A run read back from its directory for reports, also while it is running."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lockstep.rollout.errors import ConfigError, DataError
from lockstep.rollout.records import Rollout
from lockstep.rollout.saved_rollouts import read_newest_rollouts
from lockstep.rollout.system.plain_files import read_plain
from lockstep.trainer.checkpoint.run_dir import RunDirectory
from lockstep.trainer.config.saved_config import read_saved
from lockstep.trainer.observe.alarms import AlarmThresholds, alarms
from lockstep.trainer.observe.metrics_log import read_metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmSpan:
    """An alarm with the consecutive updates at which it was raised."""

    first: int
    last: int
    sentence: str
    """Message at the first of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun:
    name: str
    media: Path
    """Folder of its images."""
    config: Mapping[str, Any]
    """Content of config.yaml: nested, without secrets. Values may have any type."""
    lines: Sequence[Mapping[str, float]]
    """Lines of metrics.jsonl, one per step; `step` is the update."""
    rollouts: Sequence[Rollout]
    """Rollouts of the newest step whose file can be read."""
    rollouts_update: int | None
    passed_over: Sequence[str]
    """Message on each newer file of rollouts that cannot be read."""
    provenance: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> SavedRun:
        """Read a run. Raises `ConfigError` if `path` holds none or its settings are damaged, `DataError` if its metrics
        or its provenance are damaged."""
        run = RunDirectory(path)
        if not run.metrics.is_file() or not run.config.is_file():
            raise ConfigError(
                f"{path} is not the directory of a run with at least one step: expected config.yaml and metrics.jsonl "
                "in it; name one, for example runs/latest"
            )
        newest_path, rollouts, passed_over = read_newest_rollouts(run.rollouts)
        return cls(
            name=path.resolve().name,
            media=run.media,
            config=OmegaConf.to_container(read_saved(run.config)),  # type: ignore[arg-type]
            lines=read_metrics(run.metrics),
            rollouts=rollouts,
            rollouts_update=int(newest_path.stem.split("-")[1]) if newest_path else None,
            passed_over=passed_over,
            provenance=_provenance(run.provenance) if run.provenance.is_file() else {},
        )

    @property
    def changed_files(self) -> dict[str, int]:
        """Path of a user's file that was changed -> last update for which its earlier content was used."""
        changes = self.provenance.get("files", {}).get("changes", {})
        return {str(path): int(update) for path, update in changes.items()}

    def series(self, name: str) -> list[tuple[float, float]]:
        """Return (update, value) of the steps with a finite value of the metric."""
        return [(line["step"], line[name]) for line in self.lines if line.get(name) is not None]

    def values(self, name: str) -> list[float]:
        return [value for _, value in self.series(name)]

    def evaluations(self) -> list[tuple[str, str]]:
        """Return the name of each evaluated data set and the metric with its mean reward."""
        names = {name for line in self.lines for name in line if name.startswith("eval/")}
        sets = [
            name.removeprefix("eval/").removesuffix("reward_mean") for name in names if name.endswith("/reward_mean")
        ]
        return [(f"held out {name}".rstrip(" /"), f"eval/{name}reward_mean") for name in sorted(sets)]

    def setting(self, name: str) -> Any:
        """Return the value of `group.name`; None if the run's version had no such setting."""
        return nested(self.config, name)

    def thresholds(self) -> AlarmThresholds:
        """Return the thresholds of its alarms. Raises `ConfigError` if config.yaml holds others than numbers."""
        try:
            return AlarmThresholds.of(self.setting)
        except ConfigError as error:
            raise ConfigError(f"config.yaml of {self.name}: {error}") from error

    def alarms(self) -> list[AlarmSpan]:
        """Recompute every alarm of the run from its metrics and the thresholds of its configuration."""
        thresholds = self.thresholds()
        spans: list[AlarmSpan] = []
        running: dict[str, AlarmSpan] = {}
        for line in self.lines:
            # Non-finite numbers are null in the file; as NaN they raise their alarm again.
            metrics = {name: math.nan if value is None else value for name, value in line.items()}
            now: dict[str, AlarmSpan] = {}
            for sentence in alarms(metrics, thresholds):
                name, update = sentence.partition(" is ")[0], int(line["step"])
                before = running.get(name)
                now[name] = AlarmSpan(
                    first=before.first if before else update,
                    last=update,
                    sentence=before.sentence if before else sentence,
                )
            spans += [span for name, span in running.items() if name not in now]
            running = now
        return sorted([*spans, *running.values()], key=lambda span: (span.first, span.sentence))

    def extremes(self, count: int) -> tuple[list[Rollout], list[Rollout]]:
        """Return at most `count` worst and best rollouts of the newest saved step. Failed ones rank lowest."""
        ranking = sorted(self.rollouts, key=_rank)
        worst, best = ranking[: len(ranking) // 2], ranking[len(ranking) // 2 :][::-1]
        return _varied(worst, count), _varied(best, count)


def nested(config: Mapping[str, Any], name: str) -> Any:
    """Return the value of `group.name`; None if there is no such setting."""
    value: Any = config
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _provenance(path: Path) -> dict[str, Any]:
    """Read provenance.json. Raises `DataError`."""
    try:
        provenance = json.loads(read_plain(path, errors="replace"))
        code = provenance.get("code", {})
        if not isinstance(code.get("commit"), str | None):
            raise TypeError("code.commit is not text")
        if not all(type(update) is int for update in provenance.get("files", {}).get("changes", {}).values()):
            raise TypeError("files.changes has no updates")
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise DataError(f"{path} is not the provenance of a run: {error}; delete it to see the rest") from error
    return provenance


def _varied(ranked: Sequence[Rollout], count: int) -> list[Rollout]:
    """Return the first `count`, taking one rollout of each prompt before a second one of equal reward."""
    selection: list[Rollout] = []
    for _, equal in groupby(ranked, key=_rank):
        counts: Counter[int] = Counter()
        turns: list[tuple[int, Rollout]] = []
        for rollout in equal:
            turns.append((counts[rollout.group_id], rollout))
            counts[rollout.group_id] += 1
        selection += [rollout for _, rollout in sorted(turns, key=lambda turn: turn[0])]
    return selection[:count]


def _rank(rollout: Rollout) -> tuple[bool, float]:
    return rollout.is_trainable, rollout.reward if rollout.is_trainable else 0.0
