"""The result of a diagnosis: a record, JSON with a fixed shape (docs/diagnosis.md), and a table for the console."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lockstep.lab.diagnosis.case_distributions import CHOICE, finite
from lockstep.lab.diagnosis.causes import CRITICAL_KL, OK, WARNING_KL, Cause, Finding, Severity
from lockstep.lab.diagnosis.evidence import Evidence, ScoredTokens, by_class, by_turn, noise_floor, worst_positions
from lockstep.rollout.safe_text import terminal_safe
from lockstep.trainer.config.groups.correction_settings import CorrectionConfig
from lockstep.trainer.config.groups.model_settings import ModelConfig

FORMAT = 1
"""Version of the JSON; an incompatible change increments it."""
REEXAMINED = ("alignment", "retokenisation")
"""Cases that show the rollouts of another case again."""
SEVERITY_STYLE = {Severity.OK: "green", Severity.WARNING: "yellow", Severity.CRITICAL: "bold red"}
PRINTED_WORST = 5
WHOLE_COLUMNS = {
    "kl": "KL(e‖t)",
    "kl_limit": "at most",
    "kl_max": "max",
    "kl_reverse": "KL(t‖e)",
    "tv": "TV",
    "flips": "flips",
    "move": "Δ log p",
    "move_limit": "at most",
}
"""Columns of the table of distributions, by number (docs/diagnosis.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseReport:
    """Result of one case."""

    name: str
    purpose: str
    note: str
    """Comment beside the numbers; may be empty."""
    finding: Finding
    num_rollouts: int
    num_failed: int
    """Rollouts without trainable tokens; no other number includes them."""
    evidence: Evidence
    scored: ScoredTokens

    def to_json(self) -> dict[str, Any]:
        match, engine = self.evidence.match, self.evidence.engine
        return {
            "name": self.name,
            "purpose": self.purpose,
            "note": self.note,
            "verdict": str(self.finding.severity),
            "cause": self.finding.cause,
            "explanation": self.finding.explanation,
            "rollouts": self.num_rollouts,
            "failed_rollouts": self.num_failed,
            "rows": len(self.scored.batch.rows),
            "sampled_tokens": match.sampled,
            "trained_tokens": match.trained,
            "match_rate": match.match_rate,
            "id_match_rate": match.id_match_rate,
            "coverage": match.coverage,
            **self.evidence.mismatch,
            "noise_floor": self.evidence.noise,
            "by_class": by_class(self.scored),
            "by_turn": by_turn(self.scored),
            "abs_diff_by_offset": {f"{offset:+d}": diff for offset, diff in self.evidence.abs_diff_by_offset.items()},
            "engine_check": None if engine is None else asdict(engine),
            "distributions": self.evidence.whole and self.evidence.whole.to_json(self.scored.texts.__getitem__),
            "worst": worst_positions(self.scored),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Verdict on a pipeline, and the cases it rests on."""

    finding: Finding
    cases: tuple[CaseReport, ...]
    noise_floor: Mapping[str, float]
    """The trainer against itself, over the rows of all cases; empty if rows were scored once."""
    settings: Mapping[str, Any]
    """Model, dtype, correction mode, temperature, and the deliberate fault or None."""

    @property
    def distinct_cases(self) -> list[CaseReport]:
        """Cases without those that show the rollouts of another case again."""
        return [case for case in self.cases if case.name not in REEXAMINED]

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "verdict": str(self.finding.severity),
            "cause": self.finding.cause,
            "explanation": self.finding.explanation,
            "thresholds": {"warning": WARNING_KL, "critical": CRITICAL_KL},
            "settings": self.settings,
            "noise_floor": self.noise_floor,
            "cases": [case.to_json() for case in self.cases],
        }


def conclude(
    cases: Sequence[CaseReport],
    model: ModelConfig,
    correction: CorrectionConfig,
    *,
    temperature: float,
    variant: Cause | None = None,
) -> Diagnosis:
    """Combine cases: the worst severity, and of several causes the first in `Cause`, which invalidates the others."""
    finding = OK
    if decisive := next((case for cause in Cause for case in cases if case.finding.cause is cause), None):
        finding = Finding(
            severity=max(case.finding.severity for case in cases),
            cause=decisive.finding.cause,
            explanation=f"{decisive.name}: {decisive.finding.explanation}",
        )
    return Diagnosis(
        finding=finding,
        cases=tuple(cases),
        noise_floor=noise_floor([case.scored for case in cases if case.name not in REEXAMINED]),
        settings={
            "model": model.path,
            "dtype": model.dtype,
            "correction": correction.mode,
            "temperature": temperature,
            "broken": variant,
        },
    )


def print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    console.print(_case_table(diagnosis.cases))
    for case in diagnosis.cases:
        if case.note:
            console.print(f"[dim]{case.name}[/dim]  {escape(case.note)}")
    console.print()
    console.print(_part_table(diagnosis.distinct_cases))
    print_distributions(diagnosis.distinct_cases, console)
    console.print("\n[bold]worst positions[/bold]")
    worst = [(case.name, place) for case in diagnosis.distinct_cases for place in worst_positions(case.scored)]
    for name, place in sorted(worst, key=lambda entry: -abs(entry[1]["diff"]))[:PRINTED_WORST]:
        before, text, after = (
            terminal_safe(place["before"])[-28:],
            terminal_safe(place["text"]),
            terminal_safe(place["after"])[:20],
        )
        console.print(
            f"  {place['diff']:+.2e}  samp {place['logp_samp']:8.4f}  train {place['logp_train']:8.4f}  "
            f"[dim]{name} rollout {place['rollout_id']} @{place['position']} {place['token_class']}[/dim]  "
            f"[dim]{escape(before)}[/dim][reverse]{escape(text)}[/reverse][dim]{escape(after)}[/dim]"
        )
    console.print()
    if floor := diagnosis.noise_floor:
        console.print(
            f"noise floor  kl_v1 {floor['kl_v1']:+.1e}  kl_v2 {floor['kl_v2']:.1e}  "
            f"|Δ|max {floor['logp_diff_abs_max']:.1e}   [dim]the trainer against itself, in two packings[/dim]"
        )
    console.print(f"verdict      {_verdict(diagnosis.finding)}  {escape(diagnosis.finding.explanation)}")


def print_distributions(cases: Sequence[CaseReport], console: Console) -> None:
    compared = [(case, whole) for case in cases if (whole := case.evidence.whole) is not None]
    if not compared:
        console.print("\n[bold]distributions[/bold]  not compared: no engine, or no row that fits into its context")
        return
    table = _table("case", right=("positions", *WHOLE_COLUMNS.values()))
    for case, whole in compared:
        numbers = whole.whole.numbers()
        table.add_row(case.name, str(len(whole.positions)), *(general(finite(numbers[name])) for name in WHOLE_COLUMNS))
    console.print(f"\n[bold]distributions[/bold]  [dim]{CHOICE}[/dim]")
    console.print(table)
    for case, whole in compared:
        tokens = [
            f"{one['token_id']} {terminal_safe(case.scored.texts[one['token_id']])!r} {general(one['logp_engine'])} to "
            f"{general(one['logp_trainer'])} at {one['position']}"
            for one in whole.moved
        ]
        console.print(f"  {case.name} log p of engine to trainer moves most for  {'   '.join(tokens)}", markup=False)


def general(number: float | None) -> str:
    return "-" if number is None else f"{number:.3g}"


def _case_table(cases: Sequence[CaseReport]) -> Table:
    table = _table("case", right=("rollouts", "tokens", "match", "coverage", "kl_v1", "kl_v2", "|Δ|max", "floor kl_v2"))
    table.add_column("verdict", no_wrap=True)
    for case in cases:
        match, mismatch = case.evidence.match, case.evidence.mismatch
        table.add_row(
            case.name,
            f"{case.num_rollouts}" + (f" (+{case.num_failed} failed)" if case.num_failed else ""),
            str(match.trained),
            f"{match.match_rate:.3f}",
            f"{match.coverage:.3f}",
            *(_number(mismatch, name) for name in ("kl_v1", "kl_v2", "logp_diff_abs_max")),
            _number(case.evidence.noise, "kl_v2"),
            _verdict(case.finding),
        )
    return table


def _part_table(cases: Sequence[CaseReport]) -> Table:
    table = _table("case", "part", right=("tokens", "kl_v1", "kl_v2"))
    for case in cases:
        turns = {f"turn {turn}": part for turn, part in by_turn(case.scored).items()}
        parts = by_class(case.scored) | turns
        if len(parts) < 3:
            continue  # one class and one turn
        for index, (name, part) in enumerate(parts.items()):
            numbers = f"{part['tokens']:.0f}", _number(part, "kl_v1"), _number(part, "kl_v2")
            table.add_row("" if index else case.name, name, *numbers)
    return table


def _table(*left: str, right: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in (*left, *right):
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    return table


def _verdict(finding: Finding) -> str:
    style = SEVERITY_STYLE[finding.severity]
    return f"[{style}]{finding.severity}{f' ({finding.cause})' if finding.cause else ''}[/{style}]"


def _number(metrics: Mapping[str, float], name: str) -> str:
    return f"{metrics[name]:+.1e}" if name in metrics else "-"
