"""Page of a location: heat maps of layers and operators over positions, shares, and every landmark."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from markupsafe import Markup
from torch import Tensor

from lockstep.lab.locate.comparison import MAX_RATIO, Errors
from lockstep.lab.locate.location import Location
from lockstep.lab.locate.location_report import explanation, number
from lockstep.lab.pages.render import render, write_page

TEMPLATE = "location.html.jinja"
LABEL, CELL_HEIGHT, AXIS = 300, 16, 20
"""Width of the names, and heights of a row and of the axis, in units of the drawing."""
WIDTH = 1200
FULL = 1000.0
"""Ratio of full color; colors are logarithmic, from none at 1."""
TICK = 16
"""Positions between two marks of the axis."""
LEVELS = {"ok": "ok", "named": "critical", "unproven": "warning"}
"""Color of the badge by verdict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A row of a heat map."""

    name: str
    ratio_T: Tensor
    is_marked: bool


def write_location_page(path: Path, location: Location, settings: Mapping[str, Any]) -> None:
    """Write the page and create its directories. Raises OSError if the path cannot be written."""
    write_page(path, location_page(location, settings))


def location_page(location: Location, settings: Mapping[str, Any]) -> str:
    """Render the page as HTML. settings: what was compared, by name."""
    computed = [one for one in location.errors if one.engine or one.trainer]
    first = location.named[0] if location.named else max(computed, key=lambda one: one.ratio)
    layer = first.landmark.layer
    own = [one for one in computed if one.landmark.layer == layer]
    positions = location.trace.num_positions
    return render(
        TEMPLATE,
        location=location,
        settings=settings,
        level=LEVELS[location.verdict],
        explanation=explanation(location),
        max_ratio=MAX_RATIO,
        layers=heat_map(layer_bands(location), positions, location.trace.num_prompt),
        operators=heat_map(
            [_band(one.landmark.label, [one], positions) for one in own], positions, location.trace.num_prompt
        ),
        shown="outside of the layers" if layer is None else f"in layer {layer}",
        computed=computed,
        number=number,
    )


def layer_bands(location: Location) -> list[Band]:
    """Return one row per layer, and one for what is outside of the layers, each the largest of its operators."""
    members: dict[int | None, list[Errors]] = {}
    for one in location.errors:
        members.setdefault(one.landmark.layer, []).append(one)
    layers = sorted(members, key=lambda layer: (layer is None, layer or 0))
    positions = location.trace.num_positions
    return [
        _band("norm and head" if layer is None else f"layer {layer}", members[layer], positions) for layer in layers
    ]


def _band(name: str, errors: Sequence[Errors], positions: int) -> Band:
    """Join landmarks by their largest ratios. The head has the sampled positions alone, which are the last."""
    ratio_T = torch.zeros(positions)
    for one in errors:
        last = ratio_T[positions - len(one.ratio_T) :]
        torch.maximum(last, one.ratio_T.float(), out=last)
    return Band(name=name, ratio_T=ratio_T, is_marked=any(one.leaves_floor for one in errors))


def heat_map(bands: Sequence[Band], positions: int, num_prompt: int) -> Markup:
    """Draw rows of cells, each colored by how many floors the larger error is."""
    width = (WIDTH - LABEL) / positions
    height = CELL_HEIGHT * len(bands) + AXIS
    parts = []
    for row, band in enumerate(bands):
        y = row * CELL_HEIGHT
        parts.append(
            Markup('<text class="{}" x="{}" y="{}" text-anchor="end">{}</text>').format(
                "marked" if band.is_marked else "name", LABEL - 8, y + 12, band.name
            )
        )
        for position, ratio in enumerate(band.ratio_T.tolist()):
            parts.append(
                Markup(
                    '<rect x="{:.2f}" y="{}" width="{:.2f}" height="{}" fill-opacity="{:.2f}"><title>{}</title></rect>'
                ).format(
                    LABEL + position * width,
                    y,
                    width,
                    CELL_HEIGHT - 1,
                    opacity(ratio),
                    f"{band.name}, position {position}: {number(ratio)} floors",
                )
            )
    edge = LABEL + num_prompt * width
    parts.append(Markup('<path class="edge" d="M{:.2f} 0V{}"/>').format(edge, CELL_HEIGHT * len(bands)))
    parts += [
        Markup('<text class="name" x="{:.2f}" y="{}" text-anchor="middle">{}</text>').format(
            LABEL + (tick + 0.5) * width, height - 5, tick
        )
        for tick in range(0, positions, TICK)
    ]
    return Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="heat map">{}</svg>').format(
        WIDTH, height, Markup("").join(parts)
    )


def opacity(ratio: float) -> float:
    """Return 0 up to one floor, and 1 from `FULL` floors."""
    if ratio <= 1:
        return 0.0
    return min(1.0, math.log(ratio) / math.log(FULL)) if math.isfinite(ratio) else 1.0
