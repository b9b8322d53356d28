"""Metrics and rollouts of a run in the terminal (`lockstep inspect-run`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lockstep.lab.pages.thumbnails import sized_mark
from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.records import Rollout
from lockstep.rollout.safe_text import print_error, terminal_safe
from lockstep.rollout.saved_rollouts import read_newest_rollouts, read_rollouts
from lockstep.rollout.system.plain_files import behind_link
from lockstep.trainer.observe.console import COLUMNS, RunConsole
from lockstep.trainer.observe.metrics_log import read_metrics

LINE = {column.key for column in COLUMNS if not column.is_stage}
"""Metrics of the lines of the console."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Rollouts of a step to show; by default its best and its worst."""

    rollout_id: int | None = None
    best: int = 0
    """Number of those with the highest rewards."""
    worst: int = 0
    failed: bool = False
    """True for all that were not trained because something failed."""

    def of(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return the selected rollouts: the best, the worst, then those that failed, each once."""
        if self.rollout_id is not None:
            return [rollout for rollout in rollouts if rollout.rollout_id == self.rollout_id]
        if not (self.best or self.worst or self.failed):
            ranking = sorted(rollouts, key=lambda rollout: rollout.reward)
            return [ranking[-1], ranking[0]] if len(ranking) > 1 else ranking
        ranking = sorted(filter(attrgetter("is_trainable"), rollouts), key=lambda rollout: rollout.reward)
        best, worst = ranking[::-1][: self.best], ranking[: self.worst]
        lost = [rollout for rollout in rollouts if self.failed and not rollout.is_trainable]
        return list({rollout.rollout_id: rollout for rollout in (*best, *worst, *lost)}.values())


def is_frequent(metric: str) -> bool:
    """Return True for the metrics that are shown unless all are asked for: of the console's lines, rewards, tools."""
    return (
        metric in LINE
        or metric.startswith("environment/")
        or (metric.startswith("reward/") and metric.endswith("/mean"))
    )


def show_run(run: Path, *, step: int | None, selection: Selection, all_metrics: bool, with_tokens: bool) -> int:
    """Print the metrics of a step and some of its rollouts. Returns the exit status: 2 if none are saved.

    step: update; None: the newest with saved rollouts. Raises `LockstepError`: files that cannot be read.
    """
    console = Console(highlight=False)
    run = behind_link(run)
    directory = run / "rollouts"
    if step is None:
        path, rollouts, passed_over = read_newest_rollouts(directory)
        for sentence in passed_over:
            print_error(sentence)
    else:
        path = directory / f"step-{step:06d}.jsonl"
        rollouts = list(read_rollouts(path)) if path.is_file() else []
    if path is None or not rollouts:
        print_error(f"no saved rollouts at {path or directory}")
        return 2
    update = int(path.stem.split("-")[1])
    metrics = next((line for line in read_metrics(run / "metrics.jsonl") if line["step"] == update), {})
    title = Text(f"{terminal_safe(run.resolve().name)}, update {update}")
    table = Table(title=title, show_header=False)
    for name, value in metrics.items():
        if "/" in name and value is not None and (all_metrics or is_frequent(name)):
            table.add_row(Text(terminal_safe(name)), f"{value:.6g}")
    num_hidden = 0 if all_metrics else sum("/" in name and not is_frequent(name) for name in metrics)
    table.caption = f"{num_hidden} more with --metrics" if num_hidden else None
    console.print(table)

    shown_rollouts = selection.of(rollouts)
    if not shown_rollouts:
        console.print(f"none of the {len(rollouts)} rollouts of this step is one of those")
    for rollout in shown_rollouts:
        RunConsole(enabled=True, total_updates=0).sample(rollout, sized_mark(run / "media"))
        if with_tokens:
            _print_tokens(console, rollout, run)
    return 0


def _tokenizer(model: Path) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of a run that others may have written; None without a model."""
    if not model.is_dir():
        return None
    try:
        return AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except Exception as error:  # tokenizers raises bare exceptions
        raise ConfigError(
            f"{model} has no tokenizer that loads without its own code ({type(error).__name__}: {error}); leave out "
            "--tokens, or load it yourself"
        ) from error


def _print_tokens(console: Console, rollout: Rollout, run: Path) -> None:
    tokenizer, mark = _tokenizer(run / "model"), sized_mark(run / "media")
    for number, row in enumerate(rows_from_calls(rollout.calls, rollout_id=rollout.rollout_id)):
        console.print(f"row {number}: {len(row)} tokens, {row.num_trained} trained")
        starts = {image.start: image for image in row.images}
        inner = {i for image in row.images for i in range(image.start + 1, image.end)}
        for i, token in enumerate(row.ids.tolist()):
            if i in inner:
                continue
            piece = repr(tokenizer.decode([token])) if tokenizer and token < len(tokenizer) else ""
            if image := starts.get(i):
                name = mark({"type": "image", "digest": image.digest})
                piece = terminal_safe(f"{name} {image.end - image.start} tokens")
            style = "bold" if row.loss_mask[i] else "dim"
            logprob = f"{row.sampling_logprobs[i]:9.4f}" if row.loss_mask[i] else " " * 9
            turn = f"turn {row.turns[i]:3d}" if row.loss_mask[i] else " " * 8
            console.print(Text(f"  {i:5d} {token:7d} {logprob} {turn}  {piece}", style=style))
