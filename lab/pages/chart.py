"""Charts as inline SVG, without scripts or libraries. Colors are CSS variables of the page, for light and dark themes;
every point has a tooltip with its numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup, escape

WIDTH, HEIGHT = 360.0, 190.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, 10.0, 10.0, 24.0
"""Margins, for the labels of the axes."""
MAX_POINTS = 240
"""Points of a curve above which it is drawn as means of stretches."""
NUM_COLORS = 6
LOG_DECADES = 12
"""Height of a logarithmic axis in powers of ten; smaller values are drawn at the bottom."""

SMALLEST_DECADE = -300
"""Power of ten below which floats lose precision."""

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    name: str
    points: Points
    band: Sequence[float] | None = None
    """Half width of a band around each point (a standard deviation)."""
    is_dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Curves over updates that share a value axis."""

    title: str
    curves: Sequence[Curve]
    unit: str = ""
    is_log: bool = False
    """True for |value| on a logarithmic axis, with zeros at the bottom."""
    limits: tuple[float | None, float | None] = (None, None)
    """Values that the value axis must include."""
    note: str = ""

    @property
    def is_empty(self) -> bool:
        return not any(curve.points for curve in self.curves)

    def svg(self) -> Markup:
        """Return the drawing, which scales to its container."""
        curves = [_thinned(curve) for curve in self.curves if curve.points]
        xs = [x for curve in curves for x, _ in curve.points]
        x_axis = _Axis.linear(min(xs), max(xs), whole=True)
        y_axis = self._value_axis(curves)
        parts = [_grid(x_axis, y_axis)]
        for index, curve in enumerate(curves):
            parts.append(_curve(curve, index % NUM_COLORS, x_axis, y_axis))
        label = ", ".join(f"{curve.name}: last {number(curve.points[-1][1])}" for curve in curves)
        return Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
            int(WIDTH), int(HEIGHT), f"{self.title}; {label}", Markup("").join(parts)
        )

    def _value_axis(self, curves: Sequence[Curve]) -> _Axis:
        if self.is_log:
            values = [abs(y) for curve in curves for _, y in curve.points if y]
            return _Axis.logarithmic(values or [1.0])
        values = [y for curve in curves for _, y in curve.points]
        values += [value for value in self.limits if value is not None]
        return _Axis.linear(min(values), max(values), whole=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axis:
    low: float
    high: float
    ticks: Sequence[float]
    is_log: bool = False

    @classmethod
    def linear(cls, low: float, high: float, *, whole: bool) -> _Axis:
        """Make an axis over [low, high] with three to six round ticks; whole: integers only."""
        if high <= low:
            padding = abs(low) * 0.1
            low, high = (low, low + 1) if whole or not low else (low - padding, high + padding)
        step = round_up((high - low) / 5)
        if whole:
            step = max(1.0, step)
        else:
            low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
        first = math.ceil(low / step - 1e-9)
        ticks = [i * step for i in range(first, first + 12) if i * step <= high + 1e-9 * step]
        return cls(low=low, high=high, ticks=ticks)

    @classmethod
    def logarithmic(cls, values: Sequence[float]) -> _Axis:
        """Make an axis of whole powers of ten around the positive values. `low` and `high` are exponents."""
        high = math.ceil(math.log10(max(values)) + 1e-9)
        low = max(math.floor(math.log10(min(values)) - 1e-9), high - LOG_DECADES)
        low = min(low, high - 1)
        every = max(1, math.ceil((high - low) / 5))
        return cls(low=low, high=high, ticks=[10.0**power for power in range(low, high + 1, every)], is_log=True)

    def share(self, value: float) -> float:
        """Return the position of a value between the ends, 0 to 1."""
        if self.is_log:
            value = math.log10(abs(value)) if value else self.low
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))

    def label(self, tick: float) -> str:
        return f"1e{round(math.log10(tick))}" if self.is_log else number(tick)


def number(value: float) -> str:
    """Format with three significant digits, as short as possible."""
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def round_up(step: float) -> float:
    """Return the next 1, 2 or 5 times a power of ten."""
    power = 10.0 ** max(math.floor(math.log10(step)), SMALLEST_DECADE)
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9))


def _x(share: float) -> float:
    return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)


def _y(share: float) -> float:
    return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)


def _grid(x_axis: _Axis, y_axis: _Axis) -> Markup:
    lines = []
    for tick in y_axis.ticks:
        y = _y(y_axis.share(tick))
        lines.append(Markup('<path class="grid" d="M{} {}H{}"/>').format(LEFT, y, WIDTH - RIGHT))
        lines.append(
            Markup('<text x="{}" y="{}" text-anchor="end">{}</text>').format(LEFT - 6, y + 4, y_axis.label(tick))
        )
    for tick in x_axis.ticks:
        x = _x(x_axis.share(tick))
        lines.append(Markup('<text x="{}" y="{}" text-anchor="middle">{}</text>').format(x, HEIGHT - 7, number(tick)))
    return Markup("").join(lines)


def _curve(curve: Curve, color: int, x_axis: _Axis, y_axis: _Axis) -> Markup:
    places = [(_x(x_axis.share(x)), _y(y_axis.share(y))) for x, y in curve.points]
    parts = []
    if curve.band is not None:
        edges = [
            (_x(x_axis.share(x)), _y(y_axis.share(y + side * half)))
            for side, order in ((1, 1), (-1, -1))
            for (x, y), half in list(zip(curve.points, curve.band, strict=True))[::order]
        ]
        parts.append(Markup('<path class="band s{}" d="{}Z"/>').format(color, _path(edges)))
    style = " dashed" if curve.is_dashed else ""
    parts.append(Markup('<path class="line s{}{}" d="{}"/>').format(color, style, _path(places)))
    for (x, y), (update, value) in zip(places, curve.points, strict=True):
        words = f"update {update:g}: {curve.name} {value:.6g}"
        is_alone = "" if len(places) > 1 else " alone"
        parts.append(
            Markup('<circle class="s{}{}" cx="{}" cy="{}" r="4"><title>{}</title></circle>').format(
                color, is_alone, x, y, words
            )
        )
    return Markup("").join(parts)


def _path(places: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in places)


def _thinned(curve: Curve) -> Curve:
    """Reduce a curve to at most `MAX_POINTS` points, each the mean of a stretch."""
    count = len(curve.points)
    if count <= MAX_POINTS:
        return curve
    bounds = [count * i // MAX_POINTS for i in range(MAX_POINTS + 1)]
    stretches = [slice(start, end) for start, end in pairwise(bounds)]

    def mean(values: Sequence[float]) -> float:
        return math.fsum(values) / len(values)

    return Curve(
        name=curve.name,
        points=[(curve.points[s.stop - 1][0], mean([y for _, y in curve.points[s]])) for s in stretches],
        band=None if curve.band is None else [mean(curve.band[s]) for s in stretches],
        is_dashed=curve.is_dashed,
    )


def legend(curves: Sequence[Curve]) -> Markup:
    """Return the names of the curves with their colors."""
    return Markup(" ").join(
        Markup('<span class="key"><i class="s{}"></i>{}</span>').format(index % NUM_COLORS, escape(curve.name))
        for index, curve in enumerate(c for c in curves if c.points)
    )
