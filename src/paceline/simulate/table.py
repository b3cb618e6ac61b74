"""The comparison as a table: one row a rule, as plain figures (`figures`) and for the terminal (`table`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline.observe.words.numbers import number, percent_cell
from paceline.simulate.outcome import Outcome

if TYPE_CHECKING:
    from rich.table import Table

SEES = {"best static": "all steps", "clairvoyant cut-off": "this step", "limit": "-"}
"""What a rule knows when it decides; every other sees the past alone."""


def figures(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """One dictionary a rule: equal shares a second, over naive (the first outcome) and over the limit (the last)."""
    naive, limit = outcomes[0].throughput, outcomes[-1].throughput
    return [
        {
            "rule": outcome.name,
            "sees": SEES.get(outcome.name, "the past"),
            "shares_per_s": outcome.throughput,
            "over_naive": outcome.throughput / naive,
            "over_limit": outcome.throughput / limit,
            "waiting": outcome.waiting,
            "wasted": outcome.wasted,
            "count_cv": outcome.count_cv,
        }
        for outcome in outcomes
    ]


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """The figures for a terminal. Needs rich."""
    from rich.table import Table

    drawn = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("rule", "sees"):
        drawn.add_column(name, no_wrap=True)
    for name in ("shares/s", "over\nnaive", "over\nlimit", "waiting", "wasted", "batch\nvaries"):
        drawn.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        drawn.add_row(
            row["rule"],
            row["sees"],
            number(row["shares_per_s"]),
            f"{row['over_naive']:.2f}",
            f"{row['over_limit']:.2f}",
            *(percent_cell(row[name]) for name in ("waiting", "wasted", "count_cv")),
        )
    return drawn
