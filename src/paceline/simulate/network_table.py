"""The rules on a network as figures, sentences, a table and plots; and how a model's size is written."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline.observe.words.numbers import duration, number, percent, percent_cell
from paceline.simulate.comparison_table import document, empty_table, plotly
from paceline.simulate.network_rules import MATTERS, Enough, Network, Traffic

if TYPE_CHECKING:
    from rich.table import Table

FLOAT = 4
"""Bytes of a parameter, as of its gradient."""
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}
SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))

NOT_MODELLED = (
    "Not modelled: convergence. With more local steps between rounds the same loss may need more samples, or another "
    "learning rate. Nor do rounds overlap with backward here."
)


def model_bytes(parameters: str | None, megabytes: float | None, *, needed_by: str = "--network") -> int:
    """Return the bytes of a round: four per parameter (such as ``25M``), or the given megabytes (of 1,000,000).

    >>> model_bytes("25M", None), model_bytes(None, 0.5)
    (100000000, 500000)
    """
    if (parameters is None) == (megabytes is None):
        raise ValueError(f"{needed_by} needs the model's size: --parameters 25M or --megabytes 100, one of them")
    if megabytes is not None:
        if not (math.isfinite(megabytes) and round(megabytes * 1e6) >= 1):
            raise ValueError(f"--megabytes is the model's size, above 0, not {megabytes:g}")
        return round(megabytes * 1e6)
    assert parameters is not None
    found = re.fullmatch(r"\s*(\d{1,15}(?:\.\d*)?)\s*([kmgb]?)\s*", parameters.lower(), re.ASCII)
    many = round(float(found[1]) * UNITS[found[2]]) if found else 0
    if many < 1:
        raise ValueError(f"--parameters is a count such as 25M, 350k or 7B, above 0, not {parameters!r}")
    return FLOAT * many


def figures(outcomes: Sequence[Traffic]) -> list[dict[str, Any]]:
    """Return one dictionary per rule; the first outcome is gradients at every step, the last the limit."""
    gradients, limit = outcomes[0].samples_per_s, outcomes[-1].samples_per_s
    return [
        {
            "rule": outcome.name,
            "samples_per_s": outcome.samples_per_s,
            "over_gradients": outcome.samples_per_s / gradients,
            "over_limit": outcome.samples_per_s / limit,
            "in_rounds": outcome.in_rounds,
            "waiting": outcome.waiting,
            "round_every_s": outcome.round_every_s if outcome.rounds else None,
            "bytes_per_sample": outcome.bytes_per_sample,
            "sent_bytes_per_worker_s": outcome.sent_per_s,
            "rounds": outcome.rounds,
            "samples": outcome.samples,
            "seconds": outcome.seconds,
            "sent_bytes_per_worker": outcome.sent_bytes,
        }
        for outcome in outcomes
    ]


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the figures as a table for a terminal. Needs rich."""
    each, scale = _unit(max(row["bytes_per_sample"] for row in rows))
    sent, sent_scale = _unit(max(row["sent_bytes_per_worker_s"] for row in rows))
    traffic = (f"{each} per\nsample", f"{sent}/s per\nworker")
    drawn = empty_table(["rule"], ["samples/s", "gain", "in\nrounds", "waiting", "round\nevery, s", *traffic])
    for row in rows:
        drawn.add_row(
            row["rule"],
            number(row["samples_per_s"]),
            f"{row['over_gradients']:.2f}",
            percent_cell(row["in_rounds"]),
            percent_cell(row["waiting"]),
            "-" if row["round_every_s"] is None else number(row["round_every_s"]),
            number(row["bytes_per_sample"] / scale),
            number(row["sent_bytes_per_worker_s"] / sent_scale),
        )
    return drawn


def verdict(outcomes: Sequence[Traffic], network: Network, period: Enough | None) -> list[str]:
    """Return what the figures mean, in sentences."""
    if network.workers < 2:
        return ["One worker has no rounds: the network does not matter."]
    gradients = outcomes[0]
    work_s = (gradients.seconds - gradients.rounds_s) / gradients.rounds
    sentences = [
        f"On {network.link.describe()} a round of {size(network.model_bytes)} takes {seconds(network.gradients_s)}, a "
        f"step's work {seconds(work_s)}: with gradients at every step {percent(gradients.in_rounds)} of the time goes "
        "into rounds."
    ]
    if period is None:
        return [*sentences, _does_not_matter(outcomes)]
    sentences.append(
        f"From a round every {period.every_steps:,} {'step' if period.every_steps == 1 else 'steps'} or "
        f"{seconds(period.period_s)} on, rounds take at most {percent(period.part)} of the time: from there on the "
        "network no longer matters."
    )
    return [*sentences, _pays(outcomes)]


def _pays(outcomes: Sequence[Traffic]) -> str:
    name, gain = _best(outcomes)
    if gain <= 1:
        return "No period tried does more samples per second than gradients at every step."
    return (
        f'"{name}" does {number(gain)} times the samples per second of gradients at every step: it pays unless it '
        f"needs more than {number(gain)} times the samples for the same loss."
    )


def _does_not_matter(outcomes: Sequence[Traffic]) -> str:
    advice = "The network does not matter here: take gradients at every step, which are exact."
    name, gain = _best(outcomes)
    if gain <= 1 + MATTERS:
        return advice
    return (
        f'{advice} What "{name}" gains, {number(gain)} times the samples per second, is less waiting: see what a '
        "deadline makes of that (joint, without --network)."
    )


def _best(outcomes: Sequence[Traffic]) -> tuple[str, float]:
    """Return the average with the most samples per second, and its gain over gradients at every step."""
    best = max(outcomes[1:-1], key=lambda outcome: outcome.samples_per_s)
    return best.name, best.samples_per_s / outcomes[0].samples_per_s


def page(title: str, outcomes: Sequence[Traffic], sentences: Sequence[str]) -> str:
    """Return one self-contained page of HTML: the sentences, where the time goes, and bytes per sample."""
    return document(title, [_times(outcomes), _bytes(outcomes)], words=sentences)


def _times(outcomes: Sequence[Traffic]) -> Any:
    """Draw the fleet's milliseconds per sample: working, waiting and in rounds."""
    names, each = [o.name for o in outcomes], [1000 / o.samples_per_s for o in outcomes]
    parts = {
        "working": [ms * (1 - o.in_rounds - o.waiting) for ms, o in zip(each, outcomes)],
        "waiting": [ms * o.waiting for ms, o in zip(each, outcomes)],
        "in rounds": [ms * o.in_rounds for ms, o in zip(each, outcomes)],
    }
    figure = plotly("plotly.graph_objects").Figure()
    for part, values in parts.items():
        figure.add_bar(x=values, y=names, name=part, orientation="h")
    return _laid_out(figure, "Where the time goes", "milliseconds per sample", len(names))


def _bytes(outcomes: Sequence[Traffic]) -> Any:
    sending = [o for o in outcomes if o.sent_bytes]
    bars = {"x": [o.bytes_per_sample for o in sending], "y": [o.name for o in sending]}
    figure = plotly("plotly.graph_objects").Figure().add_bar(**bars, orientation="h")
    return _laid_out(figure, "Bytes sent for a sample", "bytes, all workers", len(sending)).update_xaxes(type="log")


def _laid_out(figure: Any, title: str, unit: str, rows: int) -> Any:
    return figure.update_layout(
        title=title, barmode="stack", xaxis_title=unit, yaxis={"autorange": "reversed"}, height=160 + 28 * rows
    )


def size(many: float) -> str:
    """Return bytes with a unit, in powers of 1,000.

    >>> size(100e6), size(1536), size(0)
    ('100 MB', '1.54 kB', '0 B')
    """
    name, unit = _unit(many)
    return f"{number(many / unit)} {name}"


def _unit(many: float) -> tuple[str, float]:
    return next(((name, unit) for unit, name in SIZES if many >= 0.9995 * unit), ("B", 1.0))


def seconds(value: float) -> str:
    """Return a duration in words, with a fraction below ten seconds, which `duration` would round away.

    >>> seconds(1.28), seconds(0.034), seconds(125)
    ('1.28 s', '34 ms', '2 min 05 s')
    """
    return f"{value:.3g} s" if 0.9995 <= value < 9.995 else duration(value)
