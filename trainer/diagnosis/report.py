"""What a diagnosis says: a record, JSON with a fixed shape, and a table for people.

The shape of the JSON is described in docs/diagnosis.md; `FORMAT` grows when it changes incompatibly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape

from rollout.system.terminal_text import terminal_safe
from trainer.diagnosis.cases import REEXAMINED
from trainer.diagnosis.causes import CRITICAL_KL, WARNING_KL, Cause, EngineCheck, Finding, Verdict
from trainer.diagnosis.match import TokenMatch
from trainer.diagnosis.scored import ScoredRow
from trainer.diagnosis.statistics import WorstPosition

FORMAT = 1
VERDICT_STYLE = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.CRITICAL: "bold red"}
PRINTED_WORST = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseReport:
    """Everything that was found out about one case."""

    name: str
    purpose: str
    note: str
    """What this case adds to the numbers, in words; may be empty."""
    finding: Finding
    num_rollouts: int
    num_failed: int
    """Rollouts without trainable tokens; they are in no number."""
    match: TokenMatch
    mismatch: Mapping[str, float]
    noise: Mapping[str, float]
    by_class: Mapping[str, Mapping[str, float]]
    by_turn: Mapping[str, Mapping[str, float]]
    abs_diff_by_offset: Mapping[int, float]
    engine: EngineCheck | None
    worst: Sequence[WorstPosition]
    scored: Sequence[ScoredRow]
    """For the token view; not in the JSON."""

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "purpose": self.purpose,
            "note": self.note,
            "verdict": str(self.finding.verdict),
            "cause": self.finding.cause,
            "explanation": self.finding.explanation,
            "rollouts": self.num_rollouts,
            "failed_rollouts": self.num_failed,
            "rows": len(self.scored),
            "sampled_tokens": self.match.sampled,
            "trained_tokens": self.match.trained,
            "match_rate": self.match.match_rate,
            "id_match_rate": self.match.id_match_rate,
            "coverage": self.match.coverage,
            **self.mismatch,
            "noise_floor": dict(self.noise),
            "by_class": {name: dict(part) for name, part in self.by_class.items()},
            "by_turn": {name: dict(part) for name, part in self.by_turn.items()},
            "abs_diff_by_offset": {f"{offset:+d}": value for offset, value in self.abs_diff_by_offset.items()},
            "engine_check": None if self.engine is None else asdict(self.engine),
            "worst": [asdict(position) for position in self.worst],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The answer: a verdict, its cause, and the cases it rests on."""

    verdict: Verdict
    cause: Cause | None
    explanation: str
    cases: tuple[CaseReport, ...]
    noise_floor: Mapping[str, float]
    """The trainer against itself, over the rows of all cases."""
    settings: Mapping[str, Any]
    """What was diagnosed: model, dtypes, temperature, and the variant that was switched on, if any."""

    @property
    def is_ok(self) -> bool:
        return self.verdict is Verdict.OK

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "verdict": str(self.verdict),
            "cause": self.cause,
            "explanation": self.explanation,
            "thresholds": {"warning": WARNING_KL, "critical": CRITICAL_KL},
            "settings": dict(self.settings),
            "noise_floor": dict(self.noise_floor),
            "cases": [case.to_json() for case in self.cases],
        }


def conclude(cases: Sequence[CaseReport], noise_floor: Mapping[str, float], settings: Mapping[str, Any]) -> Diagnosis:
    """The worst verdict of all cases, and of several causes the first in `Cause`: it makes the others worthless."""
    verdict = max((case.finding.verdict for case in cases), default=Verdict.OK)
    order = list(Cause)
    faulty = [case for case in cases if case.finding.cause is not None]
    first = min(faulty, key=lambda case: order.index(case.finding.cause or Cause.UNKNOWN), default=None)
    return Diagnosis(
        verdict=verdict,
        cause=first.finding.cause if first else None,
        explanation=f"{first.name}: {first.finding.explanation}" if first else "engine and trainer agree",
        cases=tuple(cases),
        noise_floor=noise_floor,
        settings=settings,
    )


def print_report(diagnosis: Diagnosis, console: Console) -> None:
    for line in _case_lines(diagnosis.cases):
        console.print(line)
    for case in diagnosis.cases:
        if case.note:
            console.print(f"[dim]{case.name}[/dim]  {escape(case.note)}")
    console.print()
    for line in _part_lines(diagnosis.cases):
        console.print(line)
    _print_worst(diagnosis.cases, console)
    if diagnosis.noise_floor:
        floor = diagnosis.noise_floor
        console.print(
            f"noise floor  kl_v1 {floor['kl_v1']:+.1e}  kl_v2 {floor['kl_v2']:.1e}  "
            f"|Δ|max {floor['logp_diff_abs_max']:.1e}   [dim]the trainer against itself, in two packings[/dim]"
        )
    console.print(f"verdict      {_styled(diagnosis.verdict, diagnosis.cause)}  {escape(diagnosis.explanation)}")


def _case_lines(cases: Sequence[CaseReport]) -> list[str]:
    head = ["case", "rollouts", "tokens", "match", "coverage", "kl_v1", "kl_v2", "|Δ|max", "floor kl_v2"]
    cells = [
        [
            case.name,
            f"{case.num_rollouts}" + (f" (+{case.num_failed} failed)" if case.num_failed else ""),
            str(case.match.trained),
            f"{case.match.match_rate:.3f}",
            f"{case.match.coverage:.3f}",
            *(_number(case.mismatch, name) for name in ("kl_v1", "kl_v2", "logp_diff_abs_max")),
            _number(case.noise, "kl_v2"),
        ]
        for case in cases
    ]
    header, *lines = _aligned([head, *cells], num_left=1)
    return [
        f"[bold]{header}  verdict[/bold]",
        *(
            f"{line}  {_styled(case.finding.verdict, case.finding.cause)}"
            for line, case in zip(lines, cases, strict=True)
        ),
    ]


def _part_lines(cases: Sequence[CaseReport]) -> list[str]:
    cells = [["case", "part", "tokens", "kl_v1", "kl_v2"]]
    for case in cases:
        if case.name in REEXAMINED or len(case.by_turn) + len(case.by_class) < 3:
            continue  # the same rollouts again, or only one part
        parts = [*case.by_class.items(), *((f"turn {turn}", part) for turn, part in case.by_turn.items())]
        for index, (name, part) in enumerate(parts):
            numbers = [f"{part['tokens']:.0f}", _number(part, "kl_v1"), _number(part, "kl_v2")]
            cells.append([case.name if index == 0 else "", name, *numbers])
    header, *lines = _aligned(cells, num_left=2)
    return [f"[bold]{header}[/bold]", *lines]


def _aligned(cells: Sequence[Sequence[str]], *, num_left: int) -> list[str]:
    """Lines of columns as wide as their widest cell: whole in a log file, where a terminal's table would be cut."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            escape(cell.ljust(width) if index < num_left else cell.rjust(width))
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]


def _styled(verdict: Verdict, cause: Cause | None) -> str:
    style = VERDICT_STYLE[verdict]
    return f"[{style}]{verdict}{f' ({cause})' if cause else ''}[/{style}]"


def _print_worst(cases: Sequence[CaseReport], console: Console) -> None:
    places = sorted(((case.name, p) for case in cases for p in case.worst), key=lambda place: -abs(place[1].diff))
    printed: set[tuple[int, int, int]] = set()
    console.print("\n[bold]worst positions[/bold]")
    for name, place in places:
        key = (place.rollout_id, place.position, place.token_id)
        if key in printed:
            continue  # the same rollouts are in several cases
        printed.add(key)
        before, after = terminal_safe(place.before)[-28:], terminal_safe(place.after)[:20]
        console.print(
            f"  {place.diff:+.2e}  samp {place.logp_samp:8.4f}  train {place.logp_train:8.4f}  "
            f"[dim]{name} rollout {place.rollout_id} @{place.position} {place.token_class}[/dim]  "
            f"[dim]{escape(before)}[/dim][reverse]{escape(terminal_safe(place.text))}[/reverse][dim]{escape(after)}[/dim]"
        )
        if len(printed) == PRINTED_WORST:
            break
    console.print()


def _number(metrics: Mapping[str, float], name: str) -> str:
    return f"{metrics[name]:+.1e}" if name in metrics else "-"
