"""Logs with figures that no training has: they are shown as far as they make sense, without a traceback."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from summary_writers import stand_in
from typer.testing import CliRunner

from quick import examples

pytest.importorskip("plotly", reason="the page is drawn by Plotly (extra view)")

from paceline.cli import app
from paceline.observe.log import sanitise
from paceline.observe.log.reader import parse_line
from paceline.observe.views import PlainView, table
from paceline.observe.words.lines import step_line
from paceline.page import html, side_by_side
from paceline.page.live import LiveRun, metrics, server_sent_event

HUGE = (1e300, -1e300, 1.8e308, 5e-324, 1e-310, float("nan"), float("inf"), -float("inf"))
FIGURES = st.one_of(
    st.sampled_from([0.0, -1.0, 0.1, 1.0, 1e9, 1e18, *HUGE]), st.floats(), st.integers(-3, 3), st.none()
)
BAD_COUNTS = st.sampled_from([-1, -(10**400), 10**18, 10**30, 10**400, 0.5, "8", None])
COUNTS = st.one_of(*[st.integers(0, 100)] * 9, BAD_COUNTS)
ODD = st.one_of(
    FIGURES, COUNTS, BAD_COUNTS, st.text(max_size=3), st.lists(FIGURES, max_size=3), st.just({}), st.booleans()
)


def sometimes(good: st.SearchStrategy[Any], bad: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(*[good] * 7, bad)


def row(each: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return sometimes(st.lists(each, min_size=2, max_size=2), st.one_of(st.lists(each, max_size=3), ODD))


STEPS = st.fixed_dictionaries(
    {
        "event": st.just("step"),
        "t": sometimes(st.floats(1e9, 1e9 + 100), ODD),
        "step": sometimes(st.integers(0, 30), COUNTS),
        "epoch": sometimes(st.integers(0, 2), COUNTS),
        "generation": sometimes(st.just(0), COUNTS),
        "workers": sometimes(st.just([0, 1]), st.one_of(row(COUNTS), st.just([1, 1]))),
        "planned": row(COUNTS),
        "samples": row(COUNTS),
        "seconds": row(FIGURES),
    },
    optional={
        **{name: row(COUNTS) for name in ("micro_batches", "behind")},
        **{name: row(FIGURES) for name in ("slowest_s", "unfinished_s", "late_s", "shortfall_s", "forecast_s")},
        **dict.fromkeys(("deadline_s", "wait_for", "wall_s", "round_s", "weight", "loss", "grad_norm"), ODD),
        "sums": st.one_of(ODD, st.dictionaries(st.text(max_size=2), ODD, max_size=2)),
        "ranges": st.one_of(ODD, st.lists(st.lists(st.lists(COUNTS, max_size=3), max_size=2), max_size=2)),
        "applied": ODD,
    },
)
LOOPS = st.fixed_dictionaries(
    {"event": st.just("steps")},
    optional=dict.fromkeys(("t", "length", "global_batch", "epochs", "steps", "first_step", "dealt"), ODD),
)
OTHERS = st.one_of(
    st.fixed_dictionaries(
        {"event": st.sampled_from(["note", "evaluate", "log", "save", "load", "end", "left", "generation", "new"])},
        optional={
            **dict.fromkeys(("t", "step", "path", "text", "level", "reason", "number", "workers", "joined"), ODD),
            "left": st.one_of(ODD, st.lists(st.dictionaries(st.sampled_from(["id", "text"]), ODD), max_size=2)),
            **{
                name: st.one_of(ODD, st.dictionaries(st.sampled_from(["count", "loss"]), ODD, max_size=2))
                for name in ("result", "figures")
            },
        },
    ),
    st.fixed_dictionaries(
        {"event": st.just("run"), "transport": st.sampled_from(["fixed", "elastic"])},
        optional=dict.fromkeys(("t", "started", "workers", "name", "pace", "version", "run_id"), ODD),
    ),
)
EVENTS = st.lists(st.one_of(STEPS, STEPS, STEPS, LOOPS, OTHERS), min_size=1, max_size=14)
RUN = {"event": "run", "t": 1e9, "version": 1, "name": "absurd", "pace": "adaptive", "workers": [{"rank": 0}]}
STEP = {
    "event": "step", "t": 1e9, "step": 0, "epoch": 0, "generation": 0, "workers": [0, 1], "planned": [8, 8],
    "samples": [8, 8], "seconds": [0.1, 0.2], "wall_s": 0.2, "loss": 1.0,
}  # fmt: skip


def write(folder: Path, events: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(event) for event in [RUN, *events]]
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def told(*args: object) -> str:
    """Return the output of the command line, which must be words."""
    done = CliRunner().invoke(app, [str(arg) for arg in args])
    assert done.exit_code in (0, 2), (args, done.output)
    assert done.exception is None or isinstance(done.exception, SystemExit), repr(done.exception)
    return done.output


def shown(folder: Path) -> None:
    """Show the run as the live page, the views and the metrics show it, after each of its events."""
    from rich.console import Console

    live, view = LiveRun(folder), PlainView(StringIO())
    for line in (folder / "events.jsonl").read_bytes().splitlines():
        if (event := parse_line(line)) is not None:
            live.add(event)
            view.show(event)
    for message in (live.quick(), live.full()):
        server_sent_event(message)
    metrics(live)
    console = Console(file=StringIO())
    console.print(table(live.snapshot(), console=console))
    if live.snapshot().step is not None:
        step_line(live.snapshot())


def survives(events: list[dict[str, Any]]) -> str:
    with TemporaryDirectory() as temporary, warnings.catch_warnings(), stand_in():
        warnings.simplefilter("error")  # a division that numpy only warns of is as wrong
        here = Path(temporary)
        run, calm = write(here / "run", events), write(here / "calm", [STEP | {"step": n} for n in range(8)])
        said = told("report", run)
        numbers = told("report", run, "--json")
        if numbers.startswith("{"):
            json.loads(numbers, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        exports = {"-o": "page.html", "--csv": "t.csv", "--perfetto": "t.json", "--tensorboard": "tb"}
        told("report", run, *(part for option, name in exports.items() for part in (option, here / name)))
        told("report", run, calm, "-o", here / "both.html")
        told("report", run, calm, "--json")
        shown(run)
        return said


EDGE_COUNTS = st.sampled_from([0, 0, 1, 8, sanitise.MOST])
EDGES = st.sampled_from(
    [None, 0.0, sanitise.SHORTEST_S, 0.1, 1.0, sanitise.LONGEST_S, -1.0, float("nan"), float("inf")]
)


def pair(each: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(each, min_size=2, max_size=2)


AT_THE_EDGES = st.builds(
    lambda step, more: STEP | more | {"step": step},
    st.integers(0, 20),
    st.fixed_dictionaries(
        {"t": st.sampled_from([None, 0.0, 1e9, 1e9 + 1, sanitise.LATEST])},
        optional={
            **{name: pair(EDGE_COUNTS) for name in ("planned", "samples", "micro_batches", "behind")},
            **{name: pair(EDGES) for name in ("seconds", "slowest_s", "unfinished_s", "late_s", "shortfall_s")},
            **dict.fromkeys(("deadline_s", "wall_s", "round_s", "weight", "grad_norm"), EDGES),
            "forecast_s": pair(EDGES),
            "wait_for": st.sampled_from([None, 0, 1, 2, sanitise.MOST]),
            "loss": st.sampled_from([None, 0.0, -1.0, sanitise.LARGEST, -sanitise.LARGEST, 1e-300]),
            "sums": st.dictionaries(
                st.sampled_from("ab"), st.sampled_from([0.0, sanitise.LARGEST, -sanitise.LARGEST, 1e-300])
            ),
            "ranges": st.just([[[0, sanitise.MOST]], [[3, 3]]]),
        },
    ),
)


@pytest.fixture(scope="module", autouse=True)
def without_plotly() -> Iterator[None]:
    """Replace Plotly, whose four megabytes per page take most of the time and are not tested."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (html, side_by_side):
            patch.setattr(module, "plotly_js", lambda: "")
        yield


@pytest.mark.slow
@settings(max_examples=examples(40))
@given(EVENTS)
def test_whatever_stands_in_a_log_is_told_in_words(events: list[dict[str, Any]]) -> None:
    survives(events)


def test_a_name_that_is_no_text_is_none() -> None:
    survives([{"event": "run", "transport": "fixed", "name": float("nan")}])


@pytest.mark.slow
@settings(max_examples=examples(40))
@given(st.lists(AT_THE_EDGES, min_size=1, max_size=24), st.sampled_from(["equal", "adaptive", "joint"]))
def test_figures_at_the_edge_of_what_can_be_are_told_in_words(events: list[dict[str, Any]], pace: str) -> None:
    survives([RUN | {"pace": pace}, *events])


@pytest.mark.parametrize(
    "absurd", [0, -1, 1e300, 5e-324, float("nan"), pytest.param(10**400, id="beyond floats"), "soon"]
)
@pytest.mark.parametrize("name", ["seconds", "samples", "wall_s", "t", "step"])
def test_one_absurd_figure_in_every_step_is_no_traceback(name: str, absurd: Any) -> None:
    each = [absurd, absurd] if isinstance(STEP.get(name), list) else absurd
    said = survives([STEP | {"step": number, "t": 1e9 + number, name: each} for number in range(12)])
    assert "samples/s" in said or "nothing to judge" in said, said
