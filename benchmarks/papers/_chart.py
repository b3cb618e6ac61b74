"""Line charts as SVG, written directly: the pages of the documentation show them, and nothing must be installed."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from paceline.page.drawing import worker_colours

WIDTH, HEIGHT = 420, 300
LEFT, RIGHT, TOP, BOTTOM = 70, 12, 34, 44
LEGEND_ROW = 16

PLOTS = Path(__file__).parents[2] / "docs" / "images" / "papers"
"""Where a whole run leaves its pictures: the documentation shows them."""

Curve = tuple[Sequence[float], Sequence[float]]


@dataclass(frozen=True)
class Chart:
    """One panel: curves by name, each its x and its y."""

    title: str
    x: str
    y: str
    curves: Mapping[str, Curve]
    log_y: bool = False

    def points(self, curve: Curve) -> list[tuple[float, float]]:
        """Those that can be drawn, with y as it is drawn."""
        pairs = [(float(x), float(y)) for x, y in zip(*curve, strict=True)]
        known = [(x, y) for x, y in pairs if math.isfinite(x) and math.isfinite(y) and (y > 0 or not self.log_y)]
        return [(x, math.log10(y) if self.log_y else y) for x, y in known]


def folder_of_plots(*, whole: bool) -> Path | None:
    """Where pictures go: ``--plots FOLDER`` on the command line, or beside the documentation in a whole run."""
    if "--plots" in sys.argv:
        return Path(sys.argv[sys.argv.index("--plots") + 1])
    return PLOTS if whole else None


def write(path: str | Path, charts: Sequence[Chart]) -> Path:
    """The panels side by side in one file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(svg(charts))
    return path


def svg(charts: Sequence[Chart]) -> str:
    height = HEIGHT + LEGEND_ROW * max(len(chart.curves) for chart in charts)
    width = WIDTH * len(charts)
    panels = "".join(f'<g transform="translate({WIDTH * i},0)">{_panel(chart)}</g>' for i, chart in enumerate(charts))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    paper = '<rect width="100%" height="100%" fill="white"/>'
    return f'{head} font-family="system-ui, sans-serif" font-size="12">{paper}{panels}</svg>\n'


def _panel(chart: Chart) -> str:
    drawn = {name: chart.points(curve) for name, curve in chart.curves.items()}
    every = [point for points in drawn.values() for point in points] or [(0.0, 0.0)]
    across = _Axis([x for x, _ in every], LEFT, WIDTH - RIGHT)
    up = _Axis([y for _, y in every], HEIGHT - BOTTOM, TOP)
    parts = [_text(LEFT, 18, chart.title, weight="bold")]
    parts += [_text((LEFT + WIDTH) / 2, HEIGHT - 8, chart.x, anchor="middle")]
    parts += [f'<g transform="rotate(-90)">{_text(-(HEIGHT - BOTTOM + TOP) / 2, 13, chart.y, anchor="middle")}</g>']
    for tick in across.ticks():
        parts += [_line(across(tick), TOP, across(tick), HEIGHT - BOTTOM)]
        parts += [_text(across(tick), HEIGHT - BOTTOM + 16, f"{tick:g}", anchor="middle")]
    for tick in up.powers() if chart.log_y else up.ticks():
        label = f"{10**tick:.3g}" if chart.log_y else f"{tick:g}"
        parts += [_line(LEFT, up(tick), WIDTH - RIGHT, up(tick)), _text(LEFT - 6, up(tick) + 4, label, anchor="end")]
    for row, ((name, points), colour) in enumerate(zip(drawn.items(), worker_colours(len(drawn)), strict=True)):
        path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in points)
        parts += [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>']
        if len(points) == 1:
            parts += [f'<circle cx="{across(points[0][0]):.1f}" cy="{up(points[0][1]):.1f}" r="3" fill="{colour}"/>']
        below = HEIGHT + LEGEND_ROW * row + 6
        parts += [f'<rect x="{LEFT}" y="{below - 5}" width="18" height="3" fill="{colour}"/>']
        parts += [_text(LEFT + 24, below, name)]
    return "".join(parts)


class _Axis:
    """From values to a place on the paper, with a little room at both ends."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        low, high = min(values), max(values)
        room = 0.03 * (high - low) or 0.5
        self.low, self.high, self.start, self.end = low - room, high + room, start, end

    def __call__(self, value: float) -> float:
        return self.start + (self.end - self.start) * (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Round numbers, three to seven of them."""
        raw = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(power * nice for nice in (1, 2, 5, 10) if power * nice >= raw)
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return [round(step * number, 12) for number in range(first, last + 1)]

    def powers(self) -> list[float]:
        """Of a logarithmic axis: round multiples of the powers of ten, the finest of which there are not too many."""
        decades = range(math.floor(self.low), math.ceil(self.high) + 1)
        for digits in ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 5), (1,)):
            ticks = [power + math.log10(digit) for power in decades for digit in digits]
            inside = [tick for tick in ticks if self.low <= tick <= self.high]
            if len(inside) <= 7:
                break
        return inside


def _line(x0: float, y0: float, x1: float, y1: float) -> str:
    return f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="#dddddd"/>'


def _text(x: float, y: float, words: str, *, anchor: str = "start", weight: str = "normal") -> str:
    style = f'text-anchor="{anchor}" font-weight="{weight}" fill="#222222"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'
