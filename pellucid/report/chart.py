"""Line charts as SVG text. The page's script draws them again, with zoom and hover, where scripts may run."""

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pellucid.report.metrics import Series, means, thin

WIDTH, HEIGHT = 720, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 12, 30

Point = tuple[int, float]


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a chart. ``color`` is a CSS class of the page; ``dots`` marks each point, for sparse curves."""

    name: str
    series: Series
    color: str = "c1"
    dots: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """One set of axes; x is always the optimizer step."""

    id: str
    title: str
    unit: str
    curves: tuple[Curve, ...]
    wide: bool = False
    zero: bool = False
    """The y axis begins at 0: for quantities whose wobble would otherwise fill the chart."""

    def data(self) -> dict[str, Any]:
        """What the page's script draws: thinned points, means of stretches and the first non-finite values."""
        return {
            "id": self.id,
            "title": self.title,
            "unit": self.unit,
            "zero": self.zero,
            "curves": [
                {
                    "name": curve.name,
                    "color": curve.color,
                    "dots": curve.dots,
                    "points": _short(thin(curve.series)),
                    "means": _short(means(curve.series)),
                    "odd": curve.series.odd[:200],
                }
                for curve in self.curves
            ],
        }

    def svg(self) -> str:
        """The chart at a fixed size on linear axes."""
        lines = [(curve, thin(curve.series)) for curve in self.curves]
        points = [point for _, line in lines for point in line]
        if not points:
            return ""
        x_low, x_high = _widen(min(x for x, _ in points), max(x for x, _ in points))
        y_low, y_high = _widen(min(y for _, y in points), max(y for _, y in points))
        y_low = min(0.0, y_low) if self.zero else y_low

        def x_of(step: float) -> float:
            return LEFT + (step - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

        def y_of(value: float) -> float:
            return HEIGHT - BOTTOM - (value - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

        parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(self.title)}">']
        for tick in ticks(y_low, y_high):
            y = f"{y_of(tick):.1f}"
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
            parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y}" dy="0.32em" text-anchor="end">{tick:g}</text>')
        for tick in ticks(x_low, x_high):
            x = f"{x_of(tick):.1f}"
            parts.append(f'<text class="tick" x="{x}" y="{HEIGHT - 8}" text-anchor="middle">{tick:g}</text>')
        for curve, line in lines:
            path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in line)
            parts.append(f'<polyline class="line {curve.color}" points="{path}"/>')
            if curve.dots or len(line) == 1:
                parts += [
                    f'<circle class="dot {curve.color}" cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="3"/>' for x, y in line
                ]
        return "".join([*parts, "</svg>"])


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About ``count`` round numbers in [low, high]."""
    raw = (high - low) / count
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _widen(low: float, high: float) -> tuple[float, float]:
    """A range of some length around a single value."""
    if high > low:
        return low, high
    margin = abs(low) * 0.1 or 1.0
    return low - margin, high + margin


def _short(points: Iterable[Point]) -> Sequence[Point]:
    return [(x, float(f"{y:.6g}")) for x, y in points]
