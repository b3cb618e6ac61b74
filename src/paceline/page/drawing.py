"""The parts that all pictures share: plain data for Plotly, colours that everybody can distinguish, short numbers."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.observe.words.numbers import worker_name

BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, YELLOW, GREY = "#CC79A7", "#56B4E9", "#F0E442", "#999999"
WORKERS = (BLUE, ORANGE, GREEN, PURPLE, SKY, RED, YELLOW, GREY)
"""Okabe and Ito's colours, which remain distinct for the colour-blind."""
CIVIDIS = ("#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838")
"""Scale for more workers than there are distinct colours: dark is slow, bright is fast."""

FEW = 10
"""Most points that are drawn with markers: a line through one point cannot be seen, and through two hardly."""


@dataclass(frozen=True)
class Picture:
    """One figure: its words, and the data that Plotly draws."""

    name: str
    """Id of the element on the page, and the part of an address after #."""
    title: str
    caption: str
    data: list[dict[str, Any]] = field(default_factory=list)
    layout: dict[str, Any] = field(default_factory=dict)
    wide: bool = False
    """Whether the picture is as wide as the page."""

    @property
    def height(self) -> int:
        return int(self.layout.get("height", 300))

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


def layout(*, y: str = "", x: str = "step", height: int = 300, **more: Any) -> dict[str, Any]:
    """Return a plain layout: the page's own colours show through, and the style sheet colours text and lines."""
    return {
        "height": height,
        "margin": {"l": 64, "r": 16, "t": 8, "b": 44},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "inherit", "size": 13},
        "hovermode": "x unified",
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
        "xaxis": {"title": {"text": x}, "zeroline": False},
        "yaxis": {"title": {"text": y}, "zeroline": False, "rangemode": "tozero"},
    } | more


def line(x: Sequence[Any], y: Iterable[float], name: str, colour: str, **more: Any) -> dict[str, Any]:
    style = {"color": colour, "width": 2} | more.pop("line", {})
    mode = "lines+markers" if len(x) <= FEW else "lines"
    return {"type": "scatter", "mode": mode, "x": x, "y": small(y), "name": text(name), "line": style} | more


def band(x: Sequence[Any], low: Iterable[float], high: Iterable[float], name: str, colour: str) -> list[dict[str, Any]]:
    """Return the area between two lines, lightly filled."""
    edge = {"mode": "lines", "line": {"width": 0, "color": colour}, "showlegend": False, "legendgroup": name}
    lower = line(x, low, f"{name}, lowest step", colour, **edge)
    upper = line(x, high, f"{name}, highest step", colour, **edge) | {"fill": "tonexty", "fillcolor": faint(colour)}
    return [lower, upper]


def upright(x: float, colour: str, dash: str, width: float = 2) -> dict[str, Any]:
    """Return a vertical line over the full height of a picture."""
    line = {"color": colour, "width": width, "dash": dash}
    return {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": line}


def faint(colour: str, part: float = 0.2) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{part})"


def small(values: Iterable[float]) -> list[float | None]:
    """Return values rounded to four digits, enough for a picture; NaN and infinity become gaps (None)."""
    given = np.fromiter(values, dtype=np.float64)
    known = np.isfinite(given)
    sized = known & (given != 0)
    beyond = np.floor(np.log10(np.abs(given), out=np.full_like(given, 3.0), where=sized)) - 3  # digits too many
    power = 10.0 ** np.minimum(np.abs(beyond), 300)
    rounded = np.where(beyond > 0, np.rint(given / power) * power, np.rint(given * power) / power)
    listed: list[float | None] = np.where(known, rounded, 0.0).tolist()
    for index in np.flatnonzero(~known).tolist():
        listed[index] = None
    return listed


def text(words: str) -> str:
    """Escape words for Plotly, which reads some HTML in its texts: a worker may be called ``<b>``."""
    return html.escape(words, quote=False)


def row_axis(rows: Sequence[tuple[int, str]]) -> dict[str, Any]:
    """Return an axis of workers and their machines, the first on top; of many, only every few are named."""
    every = max(1, len(rows) // 16)
    shown = list(range(0, len(rows), every))
    names = [worker_name(worker, machine if every == 1 else None) for worker, machine in rows]
    return {
        "tickvals": shown, "ticktext": [text(names[row].replace("emulated ", "")) for row in shown],
        "autorange": "reversed", "automargin": True, "zeroline": False, "showgrid": False,
    }  # fmt: skip


def worker_colours(count: int) -> list[str]:
    """Return a colour per worker, in order: distinct ones for a few workers, dark to bright for many."""
    if count <= len(WORKERS):
        return list(WORKERS[:count])
    last = len(CIVIDIS) - 1
    return [_mixed(CIVIDIS, last * index / (count - 1)) for index in range(count)]


def _mixed(scale: Sequence[str], position: float) -> str:
    below = min(int(position), len(scale) - 2)
    part = position - below
    pairs = [(int(scale[below][i : i + 2], 16), int(scale[below + 1][i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(a + part * (b - a)):02x}" for a, b in pairs)
