"""Console output of a run: progress with remaining time, a row per step, alarms, rollouts.

A terminal has two bars at the bottom, for updates and for the rollouts of the step, and rows scroll above them, with as
many columns as fit. Elsewhere (log file, CI) a step is one plain line of named numbers, and long stages print lines in
between. Text from outside is printed
as safe text without markup, so that it cannot style or forge the console.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.text import Text

from lockstep.rollout.records import Rollout
from lockstep.rollout.safe_text import safe_text
from lockstep.rollout.sampler.sampler import OnRollout
from lockstep.trainer.observe.alarms import dropped
from lockstep.trainer.observe.progress import ProgressLines
from lockstep.trainer.observe.transcript import conversation

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


class RunConsole:
    """Printer on rank 0; on other ranks every method does nothing."""

    def __init__(self, *, enabled: bool, total_updates: int) -> None:
        self._console = Console(quiet=not enabled, highlight=False)
        self._total_updates = total_updates
        self._rows = 0
        self._columns: tuple[Column, ...] = ()
        self._pace = Pace()
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

    @property
    def _remaining(self) -> str:
        left = self._pace.seconds_per_update
        if left is None:
            return ""
        return f"{timedelta(seconds=round(left * max(0, self._total_updates - self._pace.update)))} left"

    # A step

    def row(self, metrics: Mapping[str, float]) -> None:
        """Print the step as one line; on a terminal under a header that repeats every 20 rows."""
        update = int(metrics["step"])
        self._pace.reached(update)
        if self._progress is not None:
            self._progress.update(self._tasks["updates"], completed=update, note=self._remaining)
        if not self._rows:
            is_given = "rollout/delivered" not in metrics and "loss/demonstrations" in metrics
            self._columns = tuple(
                column
                for column in COLUMNS
                if not (is_given and column.of_rollouts)
                and (not (column.is_optional or column.is_stage) or column.key in metrics)
            )
        drops = dropped(metrics)
        if self._console.is_terminal:
            self._table_row(update, metrics)
            if drops:
                self._console.print(Text(f"  dropped: {drops}", style="yellow"))
        else:
            shortest = SHOWN_SHARE * metrics.get("time/step", 0.0)
            columns = (c for c in self._columns if not c.is_stage or metrics.get(c.key, 0.0) > shortest)
            cells = "  ".join(f"{column.name} {column.cell(metrics)}" for column in columns)
            drops = f"  dropped {drops}" if drops else ""
            self.say(f"update {update}/{self._total_updates}  {cells}{drops}  {self._remaining}".rstrip())
        self._rows += 1

    def _table_row(self, update: int, metrics: Mapping[str, float]) -> None:
        first = f"{update}/{self._total_updates}"
        width = max(len("update"), 2 * len(str(self._total_updates)) + 1)
        columns = fitting(self._columns, self._console.width - width)
        if self._rows % HEADER_EVERY == 0:
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

    def sample(self, rollout: Rollout) -> None:
        """Print one rollout as a conversation."""
        is_terminal = self._console.is_terminal
        self._console.print(conversation(rollout, wrapped=is_terminal), soft_wrap=not is_terminal)


class Pace:
    """Seconds per update: the median over the last steps, which a checkpoint or an evaluation barely shifts.

    The first step is left out: it compiles, allocates and measures the noise floor.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reached_at: float | None = None
        self._per_update: deque[float] = deque(maxlen=PACE_OVER)
        self._is_first = True
        self.update = 0

    def reached(self, update: int) -> None:
        """Record that this many updates are done now."""
        now = self._clock()
        if self._reached_at is not None and update > self.update:
            if not self._is_first:
                self._per_update.append((now - self._reached_at) / (update - self.update))
            self._is_first = False
        self.update, self._reached_at = update, now

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
