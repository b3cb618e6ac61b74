"""Curves of a benchmark: an HTML file where plotly is installed, characters in the terminal where it is not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

MARKS = "oxs+#*%@"
HEIGHT = 12


def draw(title: str, curves: Mapping[str, Sequence[float]], folder: Path) -> str:
    """Show the curves (values from 0 to 1, evenly spaced); returns the text to print."""
    if find_spec("plotly") is None:
        return text_plot(title, curves)
    import plotly.graph_objects as go

    figure = go.Figure([go.Scatter(y=list(curve), name=name) for name, curve in curves.items()])
    figure.update_layout(title=title, xaxis_title="evaluation", yaxis_title="test accuracy of the centre")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{title.replace(' ', '-').replace(',', '')}.html"
    figure.write_html(path)
    return f"{title}: {path}"


def text_plot(title: str, curves: Mapping[str, Sequence[float]]) -> str:
    """
    >>> print(text_plot("rise", {"a": [0.0, 0.5, 1.0]}).splitlines()[1].rstrip())
     100.0 |  o
    """
    low = min(min(curve) for curve in curves.values())
    high = max(max(curve) for curve in curves.values())
    width = max(len(curve) for curve in curves.values())
    grid = [[" "] * width for _ in range(HEIGHT)]
    for mark, curve in zip(MARKS, curves.values(), strict=False):
        for column, value in enumerate(curve):
            row = round((high - value) / max(high - low, 1e-9) * (HEIGHT - 1))
            grid[row][column] = mark
    levels = [high - (high - low) * row / (HEIGHT - 1) for row in range(HEIGHT)]
    lines = [f"{100 * level:6.1f} |{''.join(row)}" for level, row in zip(levels, grid, strict=True)]
    legend = "  ".join(f"{mark} {name}" for mark, name in zip(MARKS, curves, strict=False))
    return "\n".join([f"{title} (test accuracy of the centre, %)", *lines, f"        {legend}"])
