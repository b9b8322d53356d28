"""Report of a location: JSON with a fixed shape (docs/diagnosis.md), sentences, and a table for the console."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lockstep.lab.locate.comparison import MAX_RATIO, Errors
from lockstep.lab.locate.location import MIN_KL, Location, Verdict

FORMAT = 1
"""Version of the JSON; an incompatible change increments it."""
SHOWN = 8
STYLE = {Verdict.OK: "green", Verdict.NAMED: "bold red", Verdict.UNPROVEN: "yellow"}


def place(one: Errors) -> str:
    """Return operator and layer in words."""
    layer = one.landmark.layer
    return one.landmark.operator if layer is None else f"{one.landmark.operator} in layer {layer}"


def explanation(location: Location) -> str:
    """Return the verdict in one or two sentences."""
    kl = f"KL {location.kl:.1e}"
    leaving = [one for one in location.errors if one.leaves_floor]
    match location.verdict:
        case Verdict.NAMED:
            first = location.named[0]
            shares = {one.operator: one.share for one in location.groups}
            own, largest = shares.get(first.landmark.operator), max(shares, key=lambda one: shares[one], default=None)
            others = len({place(one) for one in location.named} - {place(first)})
            return (
                f"engine and trainer part at {place(first)}: the {first.side} is {number(first.ratio)} times its "
                f"rounding away from float64"
                + (f", and this operator makes {own:.0%} of {kl}" if own is not None else f", at {kl}")
                + (
                    f", {largest} {shares[largest]:.0%}"
                    if largest is not None and largest != first.landmark.operator
                    else ""
                )
                + (f"; {others} later one{'s part' if others > 1 else ' parts'}, too" if others else "")
            )
        case Verdict.UNPROVEN:
            return (
                f"no name: the errors at the landmarks do not explain {kl}, of which {location.kl_injected:.1e} is "
                "left with all of them injected; an operator without a landmark parts, errors cancel, or the map from "
                "the trainer's operators to the engine's is wrong for this model"
            )
    if leaving:
        return (
            f"no operator moves probabilities by more than {MIN_KL:g} nats; {len(leaving)} landmark"
            f"{'s leave their floors' if len(leaving) > 1 else ' leaves its floor'} without that, first "
            f"{place(leaving[0])}; {kl} is that of rounding"
        )
    return f"every operator is within {MAX_RATIO:g} times its rounding; {kl} is that of rounding"


def to_json(location: Location, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report. settings: what was compared, as the caller names it."""
    trace = location.trace
    return {
        "format": FORMAT,
        "verdict": str(location.verdict),
        "explanation": explanation(location),
        "thresholds": {"ratio": MAX_RATIO, "kl": MIN_KL},
        "settings": dict(settings),
        "row": {"prompt": trace.num_prompt, "sampled": len(trace.ids) - trace.num_prompt, "ids": list(trace.ids)},
        "kl": location.kl,
        "kl_injected": location.kl_injected,
        "named": [_entry(one) for one in location.named],
        "groups": [asdict(group) for group in location.groups],
        "landmarks": [_entry(one) for one in location.errors],
        "without_landmark": list(location.unmapped),
    }


def _entry(one: Errors) -> dict[str, Any]:
    finite = {
        name: value if value < float("inf") else None
        for name, value in (
            ("ratio", one.ratio),
            ("engine_error", one.engine),
            ("trainer_error", one.trainer),
            ("engine_floor", one.engine_floor),
            ("trainer_floor", one.trainer_floor),
        )
    }
    return {
        "operator": one.landmark.operator,
        "layer": one.landmark.layer,
        "module": one.landmark.module,
        "part": one.landmark.part.name.lower(),
        "side": one.side,
        **finite,
    }


def print_location(location: Location, console: Console) -> None:
    trace = location.trace
    console.print(
        f"row          {trace.num_prompt} tokens of a prompt and {len(trace.ids) - trace.num_prompt} sampled; "
        f"{len(location.errors)} landmarks"
    )
    if location.unmapped:
        names = ", ".join(location.unmapped[:4]) + (", ..." if len(location.unmapped) > 4 else "")
        console.print(
            f"[dim]without a landmark: {len(location.unmapped)} module{'s' if len(location.unmapped) > 1 else ''}; "
            f"errors there show at the next landmark: {escape(names)}[/dim]"
        )
    errors = location.named or sorted(location.errors, key=lambda one: -one.ratio)
    console.print(_landmarks(errors[:SHOWN]))
    if len(errors) > SHOWN:
        what = "named" if location.named else "below these"
        console.print(f"[dim]and {len(errors) - SHOWN} more {what}, in --json and --html[/dim]")
    if location.groups:
        console.print()
        console.print(_groups(location))
    console.print()
    console.print(
        f"divergence   KL {location.kl:.1e} over the sampled positions; {location.kl_injected:.1e} with all errors "
        "injected"
    )
    style = STYLE[location.verdict]
    console.print(f"verdict      [{style}]{location.verdict}[/{style}]  {escape(explanation(location))}")


def _landmarks(errors: Iterable[Errors]) -> Table:
    table = _table("layer", "operator", right=("engine", "/ floor", "trainer", "/ floor"))
    table.add_column("further from float64")
    for one in errors:
        table.add_row(
            "" if one.landmark.layer is None else str(one.landmark.layer),
            escape(one.landmark.label),
            f"{one.engine:.1e}",
            number(one.engine_ratio),
            f"{one.trainer:.1e}",
            number(one.trainer_ratio),
            f"[bold red]{one.side}[/bold red]" if one.leaves_floor else "",
        )
    return table


def _groups(location: Location) -> Table:
    table = _table("operator, all layers", right=("share of KL", "removed by it alone", "left without it"))
    for group in location.groups[:SHOWN]:
        name = escape(group.operator)
        table.add_row(
            f"[bold]{name}[/bold]" if group.is_named else name,
            f"{group.share:.1%}",
            f"{group.removed:.1%}",
            f"{group.left:.1%}",
        )
    if rest := location.groups[SHOWN:]:
        table.add_row(f"{len(rest)} others", f"{sum(group.share for group in rest):.1%}", "", "")
    return table


def _table(*left: str, right: Iterable[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def number(value: float) -> str:
    """Format a ratio: two digits after the point where they matter."""
    return f"{value:.2f}" if value < 100 else f"{value:.2g}"
