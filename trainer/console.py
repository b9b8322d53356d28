"""What a person sees while a run goes on: a progress line, a table row per step, alarms, sample rollouts.

On a terminal the line moves; elsewhere (a log file, CI) every step is one plain line. Text that a model wrote is
escaped before it is printed, so that it cannot style or forge the console.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from rollout.records import Rollout, RolloutStatus
from rollout.sampler import OnRollout

HEADER_EVERY = 20
COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("update", "step", "{:.0f}"),
    ("reward", "reward/mean", "{:.3f}"),
    ("±", "reward/std", "{:.2f}"),
    ("ref kl", "objective/kl", "{:.2f}"),
    ("kl coef", "objective/kl_coef", "{:.4f}"),
    ("value ev", "value/explained_variance", "{:.2f}"),
    ("tokens", "rollout/sampled_tokens_mean", "{:.1f}"),
    ("turns", "rollout/turns", "{:.2f}"),
    ("kl", "rollout_correction/kl", "{:+.1e}"),
    ("ess", "rollout_correction/ess", "{:.3f}"),
    ("|Δlogp|max", "rollout_correction/logp_diff_abs_max", "{:.1e}"),
    ("gradnorm", "optim/grad_norm", "{:.2f}"),
    ("tok/s", "perf/tokens_per_s", "{:.0f}"),
    ("rollout s", "time/rollout", "{:.2f}"),
    ("update s", "time/update", "{:.2f}"),
    ("sync s", "time/sync", "{:.2f}"),
)
OPTIONAL = frozenset({"ref kl", "kl coef", "value ev"})
"""Columns of runs with a reference or a critic. Score, KL and length stand side by side: a reward that is hacked shows
as a score that rises with them."""


class RunConsole:
    """Prints on rank 0; on other ranks every method does nothing."""

    def __init__(self, *, enabled: bool, total_updates: int) -> None:
        self._console = Console(quiet=not enabled, highlight=False, soft_wrap=True)
        self._total_updates = total_updates
        self._rows = 0
        self._columns = COLUMNS

    def say(self, text: str) -> None:
        self._console.print(escape(text))

    def warn(self, text: str) -> None:
        self._console.print(f"[yellow]![/yellow] {escape(text)}")

    @contextmanager
    def rollouts(self, update: int, total: int) -> Iterator[OnRollout]:
        """A moving line while rollouts arrive; transient, and only on a terminal."""
        if not self._console.is_terminal:
            yield lambda rollout: None
            return
        columns = (
            TextColumn("[progress.description]{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("rollouts  {task.fields[tokens]} tokens"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self._console, transient=True) as progress:
            task = progress.add_task(f"update {update}/{self._total_updates}", total=total, tokens=0)
            tokens = 0

            def arrived(rollout: Rollout) -> None:
                nonlocal tokens
                tokens += rollout.num_sampled
                progress.update(task, advance=1, tokens=tokens)

            yield arrived

    def row(self, metrics: Mapping[str, float]) -> None:
        """The step in one line, under a header that comes back every 20 rows."""
        if not self._rows:
            self._columns = tuple(column for column in COLUMNS if column[0] not in OPTIONAL or column[1] in metrics)
        cells = []
        for name, key, form in self._columns:
            text = form.format(metrics[key]) if key in metrics else "-"
            if name == "update":
                text = f"{text}/{self._total_updates}"
            cells.append(text.rjust(max(len(name), 8)))
        if self._rows % HEADER_EVERY == 0:
            header = " ".join(name.rjust(max(len(name), 8)) for name, _, _ in self._columns)
            self._console.print(f"[bold]{escape(header)}[/bold]")
        self._rows += 1
        self._console.print(escape(" ".join(cells)))

    def alarms(self, sentences: Sequence[str]) -> None:
        for sentence in sentences:
            self._console.print(f"[bold red]alarm[/bold red] {escape(sentence)}")

    def sample(self, rollout: Rollout) -> None:
        """One rollout as a conversation."""
        color = {RolloutStatus.COMPLETED: "green", RolloutStatus.FAILED: "red"}.get(rollout.status, "yellow")
        self._console.print(
            f"  [dim]rollout {rollout.rollout_id}[/dim]  reward [bold]{rollout.reward:.2f}[/bold]  "
            f"[{color}]{rollout.status}[/{color}]  [dim]{rollout.num_sampled} tokens, {rollout.num_turns} turns[/dim]"
        )
        for message in rollout.messages:
            if message["role"] == "system":
                continue
            line = Text("    ")
            line.append(f"{message['role']:>9} ", style="cyan")
            line.append(describe(message))
            self._console.print(line)


def describe(message: Mapping[str, object]) -> str:
    """A message in one line of plain text: content, tool calls, what could not be parsed."""
    parts = [str(message.get("content") or "").replace("\n", " ⏎ ")]
    for call in message.get("tool_calls") or ():  # type: ignore[attr-defined]
        function = call["function"]
        arguments = function["arguments"]
        parts.append(f"→ {function['name']}({arguments if isinstance(arguments, str) else json.dumps(arguments)})")
    parts += [f"✗ {error}" for error in message.get("tool_call_errors") or ()]  # type: ignore[attr-defined]
    return " ".join(part for part in parts if part)
