"""Console output of a run: progress with remaining time, a row per step, alarms, rollouts.

A terminal has two bars at the bottom, for updates and for the rollouts of the step, and rows scroll above them, with as
many columns as fit. Elsewhere (log file, CI) a step is one plain line of named numbers, and long stages print lines in
between. Text from outside is printed
as safe text without markup, so that it cannot style or forge the console.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.text import Text

from lockstep.rollout.records import Rollout
from lockstep.rollout.safe_text import safe_text
from lockstep.rollout.sampler.sampler import OnRollout
from lockstep.trainer.observe.alarms import TOOL_ERRORS, dropped
from lockstep.trainer.observe.progress import ProgressLines
from lockstep.trainer.observe.transcript import Mark, conversation

HEADER_EVERY = 20
ALARM_AGAIN_EVERY = 20
"""Steps after which a lasting alarm is printed again."""
PACE_OVER = 20
"""Steps in the median that predicts the remaining time."""
REFRESH_PER_S = 4
SHOWN_SHARE = 0.01
"""Share of a step above which the line of the step shows the time of a stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Column of the row."""

    name: str
    key: str
    form: str
    width: int
    rank: int
    """On narrow terminals, columns with the highest rank are dropped first."""
    of_rollouts: bool = True
    """True if only runs that sample rollouts show it."""
    is_optional: bool = False
    """True if only runs whose first step has the metric show it: with a reference or a critic."""
    is_stage: bool = False
    """True for the time of a stage, which only runs with that stage show; a line leaves out short ones."""
    is_event: bool = False
    """True if only lines with another value than 0 show it, and tables from the first such step on."""

    def is_in(self, metrics: Mapping[str, float]) -> bool:
        """True if a step with these metrics shows it."""
        if self.is_event:
            return metrics.get(self.key, 0.0) > 0
        return self.key in metrics or not (self.is_optional or self.is_stage)

    def cell(self, metrics: Mapping[str, float]) -> str:
        return self.form.format(metrics[self.key]) if self.key in metrics else "-"


COLUMNS = (
    Column(
        name="demo ce", key="loss/demonstrations", form="{:.4f}", width=7, rank=0, of_rollouts=False, is_optional=True
    ),
    Column(name="reward", key="reward/mean", form="{:.3f}", width=6, rank=0),
    Column(name="±", key="reward/std", form="{:.2f}", width=4, rank=2),
    Column(name="ref kl", key="objective/kl", form="{:.2f}", width=6, rank=1, is_optional=True),
    Column(name="kl coef", key="objective/kl_coef", form="{:.4f}", width=7, rank=6, is_optional=True),
    Column(name="value ev", key="value/explained_variance", form="{:.2f}", width=8, rank=5, is_optional=True),
    Column(name="tokens", key="rollout/sampled_tokens_mean", form="{:.1f}", width=6, rank=1),
    Column(name="turns", key="rollout/turns", form="{:.2f}", width=5, rank=4),
    Column(name="truncated", key="rollout/truncated_fraction", form="{:.1%}", width=9, rank=4, is_event=True),
    Column(name="context full", key="rollout/context_full_fraction", form="{:.1%}", width=12, rank=4, is_event=True),
    Column(name="tool errors", key=TOOL_ERRORS, form="{:.2f}", width=11, rank=4, is_event=True),
    Column(name="kl", key="rollout_correction/kl", form="{:+.1e}", width=8, rank=1),
    Column(name="ess", key="rollout_correction/ess", form="{:.3f}", width=5, rank=2),
    Column(name="|Δlogp|max", key="rollout_correction/logp_diff_abs_max", form="{:.1e}", width=10, rank=5),
    Column(name="gradnorm", key="optim/grad_norm", form="{:.2f}", width=8, rank=3, of_rollouts=False),
    Column(name="tok/s", key="perf/tokens_per_s", form="{:.0f}", width=6, rank=3),
    Column(name="step s", key="time/step", form="{:.2f}", width=6, rank=1, of_rollouts=False),
    *(
        Column(
            name=f"{stage} s",
            key=f"time/{stage}",
            form="{:.2f}",
            width=len(stage) + 2,
            rank=rank,
            of_rollouts=False,
            is_stage=True,
        )
        for stage, rank in (
            ("wait", 4),
            ("rollout", 4),
            ("reward", 5),
            ("teacher", 5),
            ("score", 4),
            ("update", 4),
            ("sync", 5),
        )
    ),
)
"""Score, KL and length are adjacent: reward hacking shows as a score that rises together with them."""


def with_rewards(names: Sequence[str]) -> tuple[Column, ...]:
    """Return all columns, with the mean of each reward function beside the reward, if there are several."""
    if len(names) < 2:
        return COLUMNS
    keys = {safe_text(name): f"reward/{name}/mean" for name in names}
    parts = (Column(name=name, key=key, form="{:.3f}", width=max(6, len(name)), rank=2) for name, key in keys.items())
    place = [column.key for column in COLUMNS].index("reward/std") + 1
    return (*COLUMNS[:place], *parts, *COLUMNS[place:])


class RunConsole:
    """Printer on rank 0; on other ranks every method does nothing."""

    def __init__(
        self,
        *,
        enabled: bool,
        total_updates: int,
        rewards: Sequence[str] = (),
        periodic: Mapping[str, PeriodicWork] | None = None,
    ) -> None:
        """rewards: names of the reward functions; several have a column each. periodic: what the remaining time
        includes beside the updates, by name."""
        # In a notebook rich would make an output of its own of every line; and the kernel asks for colors
        # (FORCE_COLOR), which rich takes for a terminal, although nothing there moves the cursor.
        self._console = Console(
            quiet=not enabled,
            highlight=False,
            force_jupyter=False,
            force_terminal=None if sys.stdout.isatty() else False,
        )
        self._total_updates = total_updates
        self._rows = 0
        self._all_columns = with_rewards(rewards)
        self._columns: tuple[Column, ...] = ()
        self._pace = Pace()
        self._periodic = dict(periodic or {})
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._alarms: dict[str, int] = {}

    def say(self, text: str) -> None:
        self._console.print(Text(safe_text(text)), soft_wrap=True)

    def warn(self, text: str) -> None:
        self._console.print(Text.assemble(("!", "yellow"), " ", safe_text(text)), soft_wrap=True)

    # Progress

    def begin(self, update: int) -> None:
        """Show the bars until `end`, if this is a terminal. update: number of updates done."""
        self._pace.reached(update)
        if not self._console.is_terminal or self._console.quiet:
            return
        self._progress = Progress(
            TextColumn("[bold]{task.description:>8}"),
            BarColumn(bar_width=28, complete_style="cyan"),
            MofNCompleteColumn(),
            TextColumn("[dim]{task.fields[note]}"),
            console=self._console,
            transient=True,
            refresh_per_second=REFRESH_PER_S,
        )
        self._tasks = {
            "updates": self._progress.add_task("updates", total=self._total_updates, completed=update, note=""),
            "rollouts": self._progress.add_task("rollouts", total=None, note="", visible=False),
        }
        self._progress.start()

    def end(self) -> None:
        """Remove the bars; idempotent."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    @contextmanager
    def rollouts(self, total: int) -> Iterator[OnRollout]:
        """Enclose one step: show how many of `total` rollouts have arrived, then that they are being trained."""
        progress = self._progress
        if progress is None:
            yield lambda rollout: None
            return
        task = self._tasks["rollouts"]
        progress.reset(task, total=total, description="rollouts", note="", visible=True)
        count, tokens, start = 0, 0, time.monotonic()

        def arrived(rollout: Rollout) -> None:
            nonlocal count, tokens
            count, tokens = count + 1, tokens + rollout.num_sampled
            rate = tokens / max(time.monotonic() - start, 1e-9)
            note = f"{tokens:,} tokens, {rate:,.0f} tok/s" if count < total else f"{tokens:,} tokens; training on them"
            # Dynamic sampling may request more than one batch.
            progress.update(task, completed=count, total=max(total, count), note=note)

        try:
            yield arrived
        finally:
            progress.update(task, visible=False)

    def progress(self, work: str, total: int) -> ProgressLines:
        """Return lines on long work that samples `total` rollouts, for `with`; none beside bars."""
        is_silent = self._console.quiet or self._progress is not None
        return ProgressLines(None if is_silent else self.say, work=work, total=total)

    def did(self, name: str, seconds: float) -> None:
        """Record that a periodic work is done, and how long it took: no part of an update."""
        self._periodic[name].durations.append(seconds)
        self._pace.leave_out(seconds)

    @property
    def _remaining(self) -> str:
        pace = self._pace
        works = self._periodic.values()
        return time_left(pace.update, self._total_updates, pace.seconds_per_update, works, stride=pace.stride)

    # A step

    def row(self, metrics: Mapping[str, float]) -> None:
        """Print the step as one line; on a terminal under a header that repeats every 20 rows."""
        update = int(metrics["step"])
        self._pace.reached(update)
        if self._progress is not None:
            self._progress.update(self._tasks["updates"], completed=update, note=self._remaining)
        is_given = "rollout/delivered" not in metrics and "loss/demonstrations" in metrics
        columns = tuple(
            column
            for column in self._all_columns
            if column in self._columns or (column.is_in(metrics) and not (is_given and column.of_rollouts))
        )
        has_more = len(columns) > len(self._columns)
        self._columns = columns
        drops = dropped(metrics)
        if self._console.is_terminal:
            self._table_row(update, metrics, has_header=has_more or self._rows % HEADER_EVERY == 0)
            if drops:
                line = Text(f"  dropped: {drops}", style="yellow")
                self._console.print(line, no_wrap=True, overflow="ellipsis")
        else:
            shortest = SHOWN_SHARE * metrics.get("time/step", 0.0)
            columns = (c for c in columns if not c.is_event or c.is_in(metrics))
            columns = (c for c in columns if not c.is_stage or metrics.get(c.key, 0.0) > shortest)
            cells = "  ".join(f"{column.name} {column.cell(metrics)}" for column in columns)
            drops = f"  dropped {drops}" if drops else ""
            self.say(f"update {update}/{self._total_updates}  {cells}{drops}  {self._remaining}".rstrip())
        self._rows += 1

    def _table_row(self, update: int, metrics: Mapping[str, float], *, has_header: bool) -> None:
        first = f"{update}/{self._total_updates}"
        width = max(len("update"), 2 * len(str(self._total_updates)) + 1)
        columns = fitting(self._columns, self._console.width - width)
        if has_header:
            header = " ".join(["update".rjust(width), *(column.name.rjust(column.width) for column in columns)])
            self._console.print(Text(header, style="bold"), no_wrap=True)
        cells = [first.rjust(width), *(column.cell(metrics).rjust(column.width) for column in columns)]
        self._console.print(Text(" ".join(cells)), no_wrap=True)

    def alarms(self, sentences: Sequence[str], notes: Sequence[str] = ()) -> None:
        """Print each alarm and each note when it begins, repeatedly while it lasts, and when it is over."""
        now = {sentence.partition(" is ")[0]: sentence for sentence in (*sentences, *notes)}
        for name in [name for name in self._alarms if name not in now]:
            del self._alarms[name]
            line = Text.assemble(("over", "green"), f"  {safe_text(name)} is back to normal")
            self._console.print(line, soft_wrap=True)
        for name, sentence in now.items():
            num_steps = self._alarms.get(name, 0)
            self._alarms[name] = num_steps + 1
            if num_steps % ALARM_AGAIN_EVERY == 0:
                since = f" (for {num_steps + 1} steps)" if num_steps else ""
                label = ("note", "green") if sentence in notes else ("alarm", "bold red")
                line = Text.assemble(label, " ", safe_text(sentence), (since, "dim"))
                self._console.print(line, soft_wrap=True)

    def sample(self, rollout: Rollout, mark: Mark | None = None) -> None:
        """Print one rollout as a conversation. mark: of images, as for `conversation`."""
        is_terminal = self._console.is_terminal
        self._console.print(conversation(rollout, wrapped=is_terminal, mark=mark), soft_wrap=not is_terminal)


@dataclass(slots=True, kw_only=True)
class PeriodicWork:
    """Work between updates that has its own frequency: evaluations, checkpoints."""

    every: int
    """Updates between two; 0: not periodic."""
    is_at_end: bool = True
    """True if it follows the last update, too."""
    is_after_line: bool = False
    """True if the line of its update is printed before it."""
    durations: deque[float] = field(default_factory=lambda: deque(maxlen=PACE_OVER))
    """Durations of the last times [s]."""

    def times_left(self, update: int, total: int, stride: int) -> int:
        """Return how often it is due after the line of `update`. stride: updates per step, after which it is due."""
        done = max(0, update - stride) if self.is_after_line else update
        times = total // self.every - done // self.every if self.every else 0
        times += self.is_at_end and not (self.every and total % self.every == 0)
        return max(0, min(times, math.ceil((total - done) / stride)))


def time_left(
    update: int, total: int, per_update: float | None, works: Iterable[PeriodicWork], *, stride: int = 1
) -> str:
    """Return the time until all updates and works are done; "over" it, if one of them has not been measured yet.

    per_update: seconds; None: unknown, as is the result. stride: updates per step.
    """
    if per_update is None:
        return ""
    due = [(work.durations, times) for work in works if (times := work.times_left(update, total, stride))]
    seconds = per_update * max(0, total - update)
    seconds += sum(times * statistics.median(durations) for durations, times in due if durations)
    if update >= total and not round(seconds):
        return ""
    over = "" if all(durations for durations, _ in due) else "over "
    return f"{over}{timedelta(seconds=round(seconds))} left"


class Pace:
    """Seconds per update without periodic work: the median over the last steps, which a restarted engine barely shifts.

    The first step is left out: it compiles, allocates and measures the noise floor.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reached_at: float | None = None
        self._left_out = 0.0
        self._per_update: deque[float] = deque(maxlen=PACE_OVER)
        self._is_first = True
        self.update = 0
        self.stride = 1
        """Updates of the last step."""

    def leave_out(self, seconds: float) -> None:
        """Record that so much time since the last update was spent on something else."""
        self._left_out += seconds

    def reached(self, update: int) -> None:
        """Record that this many updates are done now."""
        now = self._clock()
        if self._reached_at is not None and update > self.update:
            self.stride = update - self.update
            if not self._is_first:
                self._per_update.append((now - self._reached_at - self._left_out) / self.stride)
            self._is_first = False
        self.update, self._reached_at, self._left_out = update, now, 0.0

    @property
    def seconds_per_update(self) -> float | None:
        """Median seconds per update; None before the second step."""
        return statistics.median(self._per_update) if self._per_update else None


def fitting(columns: Sequence[Column], width: int) -> list[Column]:
    """Return the columns that fit into `width` characters, in order; drop those of the highest rank first."""
    kept_columns = list(columns)
    while kept_columns and sum(column.width + 1 for column in kept_columns) > width:
        kept_columns.remove(max(reversed(kept_columns), key=lambda column: column.rank))
    return kept_columns
