"""Examination of a dump of another trainer (`lockstep diagnose --ids`): read, measure, judge, report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lockstep.lab.diagnosis.causes import Severity, severity_of
from lockstep.lab.dumps.decision_tree import Cause, Verdict, judge
from lockstep.lab.dumps.dump_readers import read_dump
from lockstep.lab.dumps.dump_rows import Dump
from lockstep.lab.dumps.measures import Measures
from lockstep.rollout.safe_text import terminal_safe

if TYPE_CHECKING:  # loads torch
    from lockstep.lab.dumps.own_scores import OwnScores

FORMAT = 1
"""Version of the JSON; an incompatible change increments it."""
WORST = 8
BROKEN = (Cause.INVALID, Cause.NOT_SCORED, Cause.WRONG_MASK, Cause.SHIFT, Cause.RETOKENIZE, Cause.PADDING)
"""Causes that are faults at any distance."""


def examine(path: Path, own_scores: Callable[[Dump], OwnScores] | None = None, *, as_json: bool = False) -> Severity:
    """Examine a dump and print what explains it. Returns the severity, by `kl_v1` and `kl_v2` as in any diagnosis.

    own_scores: scores the ids with a model; None: the dump alone. Raises `ConfigError` and `DataError` for a dump that
    cannot be read.
    """
    measures = Measures(dump=read_dump(path))
    own = None if own_scores is None else own_scores(measures.dump)
    verdict = judge(measures)
    grade = severity(verdict.cause, kl_v1=measures.kl_v1, kl_v2=measures.kl_v2)
    if as_json:
        print(json.dumps(to_json(measures, verdict, grade, own), allow_nan=False))
    else:
        _print(path, measures, verdict, grade, own)
    return grade


def severity(cause: Cause, *, kl_v1: float, kl_v2: float) -> Severity:
    """Return the severity of a divergence; a fault is a warning at least."""
    if cause in BROKEN:
        return Severity.CRITICAL
    least = Severity.OK if cause in (Cause.NONE, Cause.DTYPE, Cause.STALE) else Severity.WARNING
    return max(least, severity_of({"kl_v1": kl_v1, "kl_v2": kl_v2}))


def to_json(measures: Measures, verdict: Verdict, grade: Severity, own: OwnScores | None) -> dict[str, Any]:
    ratio, ratio_error = measures.ratio
    return {
        "format": FORMAT,
        "written_by": measures.dump.format,
        "notes": list(measures.dump.notes),
        "rows": len(measures.dump.rows),
        "trained_tokens": measures.num_trained,
        "verdict": str(grade),
        "cause": str(verdict.cause),
        "evidence": verdict.evidence,
        "remedy": verdict.questions[-1].remedy,
        "asked": [{"asks": one.asks, "cause": str(one.cause), "is_yes": one is verdict.questions[-1]}
                  for one in verdict.questions],
        "cannot_tell": list(verdict.cannot_tell),
        "kl_v1": _number(measures.kl_v1),
        "kl_v2": _number(measures.kl_v2),
        "abs_mean": _number(measures.abs_mean),
        "mean_ratio": _number(ratio),
        "mean_ratio_error": _number(ratio_error),
        "abs_diff_by_offset": {f"{offset:+d}": diff for offset, diff in measures.abs_by_offset.items()},
        "abs_diff_by_position": [{"positions": name, "tokens": count, "abs_mean": _number(size)}
                                 for name, count, size in measures.by_position()],
        "own_scores": None if own is None else {
            "model": own.model, "temperature": own.temperature, "to_sampling": own.to_sampling,
            "to_training": own.to_training, "between": own.between, "sentence": own.sentence},
        "worst": [{name: _number(value) if isinstance(value, float) else value for name, value in place.items()}
                  for place in measures.worst(WORST)],
    }  # fmt: skip


def _number(value: float) -> float | None:
    """JSON has neither NaN nor infinity."""
    return value if abs(value) < float("inf") else None


def _print(path: Path, measures: Measures, verdict: Verdict, grade: Severity, own: OwnScores | None) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"{escape(terminal_safe(str(path)))}: {len(measures.dump.rows)} rows, {measures.num_trained} trained tokens, "
        f"in the form of {measures.dump.format}"
    )
    for note in measures.dump.notes:
        console.print(f"note         {note}")
    ratio, error = measures.ratio
    console.print(
        f"kl_v1        {measures.kl_v1:+.2e}\nkl_v2        {measures.kl_v2:.2e}\nmean |d|     "
        f"{measures.abs_mean:.2e}   [dim]d = sampling − training logprob[/dim]\n"
        f"mean e^−d    {ratio:.4f} ± {error:.4f}   [dim]1 for two policies of the same tokens[/dim]\n"
    )
    table = Table("positions", "tokens", "mean |d|", box=None, pad_edge=False, header_style="bold")
    for name, count, size in measures.by_position():
        table.add_row(name, str(count), f"{size:.1e}")
    console.print(table)
    console.print("\n[bold]worst positions[/bold]")
    for place in measures.worst(WORST):
        console.print(
            f"  {place['diff']:+.2e}  samp {place['logp_samp']:9.4f}  train {place['logp_train']:9.4f}  id "
            f"{place['token_id']}  [dim]{escape(terminal_safe(place['place']))} @{place['position']}[/dim]"
        )
    console.print("\n[bold]questions[/bold]")
    for question in verdict.questions:
        console.print(f"  {'[bold]yes[/bold]' if question is verdict.questions[-1] else 'no '}  {question.asks}")
    console.print(f"\nverdict      [bold]{grade} ({verdict.cause})[/bold]  {verdict.evidence}")
    console.print(f"to do        {verdict.questions[-1].remedy}")
    if own is not None:
        console.print(f"own scores   {escape(terminal_safe(own.sentence))}")
    for sentence in verdict.cannot_tell:
        console.print(f"cannot tell  {sentence}")
