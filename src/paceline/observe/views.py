"""The views of a run on a terminal or in a pipe. A view is given the log's events and never disturbs the training.

On a terminal that is a live table, drawn with rich on a thread of its own; in logs, pipes and notebooks one line every
few seconds, or warnings alone. The training thread only leaves events behind; drawing takes about a fiftieth of one
core at most. What the process prints meanwhile appears above the table.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from paceline import concurrency
from paceline.observe.analysis.progress import Progress, ProgressSnapshot, WorkerRow
from paceline.observe.words import lines
from paceline.observe.words.numbers import duration, number, percent, percent_cell

if TYPE_CHECKING:  # rich belongs to the command line: training works without it
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text


class View(Protocol):
    """A display of events. ``show`` returns at once and never raises; ``close`` leaves the terminal as it was."""

    def show(self, event: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class SilentView:
    """A view that shows nothing."""

    def show(self, event: Mapping[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


def make_view(stream: TextIO | None = None, *, quiet: bool = False) -> View:
    """Return a live table for a terminal, else a view of plain lines; ``stream`` is standard error by default."""
    if quiet:
        return SilentView()
    stream = stream if stream is not None else sys.stderr
    live = is_terminal(stream) and importlib.util.find_spec("rich") is not None
    return LiveView(stream) if live else PlainView(stream)


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a person reads this stream; nobody reads one that is closed or missing."""
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, ValueError):
        return False


SHORTEST_S, LONGEST_S = 2.0, 30.0
"""Seconds between two lines, at the start and after half an hour: a long run is not worth a line every two seconds."""


class PlainView:
    """A view that prints the first step, the last, and one every few seconds between; notes and results at once."""

    def __init__(self, stream: TextIO, *, clock: Callable[[], float] = concurrency.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._progress = Progress()
        self._started: float | None = None
        self._printed_at = 0.0
        self._unprinted = False

    def show(self, event: Mapping[str, Any]) -> None:
        self._progress.add(event)
        kind = event.get("event")
        if kind == "run":
            self._print(lines.run_line(event))
        elif kind == "step":
            self._unprinted = True
            if self._due():
                self._print_step()
        elif (note := lines.describe(event)) is not None:
            self._print(lines.line_of(*note))
        if kind == "end":
            self.close()

    def close(self) -> None:
        if self._unprinted:
            self._print_step()

    def _due(self) -> bool:
        now = self._clock()
        if self._started is None:
            self._started = now
            return True
        every = min(LONGEST_S, max(SHORTEST_S, (now - self._started) / 60))
        return now - self._printed_at >= every

    def _print_step(self) -> None:
        self._unprinted = False
        self._printed_at = self._clock()
        self._print(lines.step_line(self._progress.snapshot()))

    def _print(self, text: str) -> None:
        print_line(self._stream, text)


class WarningsView:
    """A view that prints the run's warnings alone: what a quiet run still shows."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show(self, event: Mapping[str, Any]) -> None:
        note = lines.describe(event) if event.get("event") == "note" else None
        if note is not None and note[0] not in ("info", "news"):
            print_line(self._stream, lines.line_of(*note))

    def close(self) -> None:
        pass


def print_line(stream: TextIO, text: str) -> None:
    """Print a line; a reader that went away, or an encoding without the character, does not stop the training."""
    try:
        encoding = getattr(stream, "encoding", None) or "utf-8"
        stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
        stream.flush()
    except (OSError, ValueError, LookupError):
        pass


FASTEST_S = 1 / 8
"""Seconds between two drawings, at least."""
CALM, SLOWEST_S = 50, 1.0
"""Pause before the next drawing: this multiple of the last one's cost, and at most this many seconds."""
SILENCE_S = 5.0
"""Seconds without a step after which the view shows the silence."""
MOST_EVENTS = 10_000
"""Events kept while the terminal does not take any output."""
MARK_WIDTH, GROUP_WIDTH, LATE_WIDTH, LEFT_WIDTH = 10, 14, 22, 24
"""Cells for marks: of workers, of groups, with deadlines, with a worker that left. Fixed, so that columns stay put."""
EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")
COLOURS = {
    "late": "bold yellow",
    "waited for": "bold yellow",
    "slowest": "dim",
    "sits out": "dim italic",
    "joined": "green",
    "left": "red",
}
LEVELS = {"warning": "yellow", "error": "red", "news": "bold"}
MOST_WORKERS = 64
"""Largest fleet that is shown worker by worker, however tall the screen."""


class Encodable:
    """A stream that replaces characters which its encoding lacks by ``?``, and the mark of a cut text by ``~``."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        encoding = self._stream.encoding
        return self._stream.write(text.replace("…", "~").encode(encoding, "replace").decode(encoding))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _encodable(stream: TextIO | None) -> Any:
    """Return the stream itself where its encoding has every character, as UTF-8 does; else wrapped."""
    encoding = getattr(stream, "encoding", None)
    return stream if stream is None or not encoding or encoding.lower().startswith("utf") else Encodable(stream)


class LiveView:
    """A table that follows the run, made by `make_view`; ``console`` is for tests and unusual terminals."""

    def __init__(self, stream: TextIO | None = None, *, console: Console | None = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = console or Console(file=_encodable(stream), highlight=False)
        self._progress = Progress()
        self._events: deque[Mapping[str, Any]] = deque(maxlen=MOST_EVENTS)
        self._stepped_at = concurrency.monotonic()
        self._news = concurrency.Event()
        self._stop = concurrency.Event()
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            redirect_stdout=is_terminal(sys.stdout),  # what goes to a file or a pipe must still go there
            redirect_stderr=is_terminal(sys.stderr),
        )
        self._thread = concurrency.Thread(target=self._run, name="paceline-view", daemon=True)
        self._live.start()
        self._thread.start()
        atexit.register(self.close)

    def show(self, event: Mapping[str, Any]) -> None:
        self._events.append(event)
        self._news.set()

    def close(self) -> None:
        """Draw the last state, which stays on the screen, and give the terminal back."""
        self._stop.set()
        self._news.set()
        if concurrency.current_thread() is not self._thread:
            self._thread.join(timeout=2.0)
        with contextlib.suppress(Exception):  # a terminal that went away is no error of the run
            self._live.stop()
        atexit.unregister(self.close)

    def _run(self) -> None:
        with contextlib.suppress(Exception):
            while not self._stop.is_set():
                if self._news.wait(timeout=1.0) or self._silence_s() > SILENCE_S:
                    self._news.clear()
                    started = time.thread_time()
                    self._draw()
                    self._stop.wait(min(SLOWEST_S, max(FASTEST_S, CALM * (time.thread_time() - started))))
            self._draw()

    def _draw(self) -> None:
        while self._events:
            self._add(self._events.popleft())
        silence_s = 0.0 if self._stop.is_set() else self._silence_s()
        self._live.update(table(self._progress.snapshot(), console=self._console, silence_s=silence_s), refresh=True)

    def _add(self, event: Mapping[str, Any]) -> None:
        self._progress.add(event)
        if event.get("event") == "step":
            self._stepped_at = concurrency.monotonic()
        note = ("info", lines.run_line(event)) if event.get("event") == "run" else lines.describe(event)
        if note is not None:
            self._console.print(_note(*note))

    def _silence_s(self) -> float:
        return concurrency.monotonic() - self._stepped_at


def table(now: ProgressSnapshot, *, console: Console, silence_s: float = 0.0) -> RenderableType:
    """Return the header, a bar for the run's progress, and one row per worker (in a large fleet, per group).

    ``silence_s``: seconds since the last step; shown when they are many, so that a stuck fleet does not look alive.
    """
    from rich.console import Group

    ascii_only = console.options.ascii_only
    if now.step is None:
        return _text([(f"{now.name}: waiting for the first step", "dim")])
    most = max(3, console.height - 8 - now.deadlines)
    silence = [f"no step for {duration(silence_s)}"] if silence_s > SILENCE_S and now.step != now.steps else []
    parts: list[RenderableType] = [_header(now, ascii_only=ascii_only), _speeds(now, silence, ascii_only=ascii_only)]
    if now.deadlines:
        parts.append(_joined([(lines.count_text(now), ""), (lines.deadline_text(now), "")], ascii_only=ascii_only))
    if now.steps:
        parts.append(_rail(now.step, now.steps, width=min(console.width - 1, 100), ascii_only=ascii_only))
    shown = group_rows(now.rows, most=most)
    mark = LATE_WIDTH if now.deadlines else MARK_WIDTH if len(shown) == len(now.rows) else GROUP_WIDTH
    mark = max(mark, LEFT_WIDTH) if any(line.kind == "left" for line in shown) else mark
    parts.append(_rows(shown, width=console.width, mark_width=mark, ascii_only=ascii_only))
    return Group(*parts)


def _header(now: ProgressSnapshot, *, ascii_only: bool) -> Text:
    facts = [(text, "") for text in (now.pace, *lines.place_texts(now), lines.left_text(now))]
    return _joined([(now.name, "bold"), *facts], ascii_only=ascii_only)


def _speeds(now: ProgressSnapshot, silence: list[str], *, ascii_only: bool) -> Text:
    facts = [(f"{number(now.samples_per_s)} samples/s", "bold green")]
    if now.limit:
        facts.append((f"{percent(now.of_limit)} of the limit ({number(now.limit)})", ""))
    facts += [(lines.loss_text(now), ""), *((text, "bold yellow") for text in silence)]
    return _joined(facts, ascii_only=ascii_only)


def _rows(rows: list[TableLine], *, width: int, mark_width: int, ascii_only: bool) -> Table:
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    bar_width = 8 if width < 100 else 24
    machine_width = max(8, width - 39 - mark_width - bar_width)
    grid.add_column("worker", min_width=6)
    grid.add_column("machine", no_wrap=True, overflow="ellipsis", max_width=machine_width)  # gives way first
    grid.add_column("share", justify="right", min_width=5)
    grid.add_column("", no_wrap=True, min_width=bar_width)
    grid.add_column("samples/s", justify="right", min_width=9)
    grid.add_column("waiting", justify="right", min_width=7)
    grid.add_column("", no_wrap=True, min_width=mark_width)
    most = max((row.samples for row in rows), default=0)
    for row in rows:
        bar = _bar(row.samples, most, width=bar_width, ascii_only=ascii_only)
        speed = number(row.speed) if row.speed else "-"
        share = "-" if row.kind == "left" and not row.samples else str(row.samples)
        colour = COLOURS.get(row.kind, "")
        grid.add_row(
            row.label, Text(row.machine), share, Text(bar, style="green"), speed,
            percent_cell(row.waiting) if row.samples else "-", Text(row.mark, style=colour),
        )  # fmt: skip
    return grid


def _rail(done: int, whole: int, *, width: int, ascii_only: bool) -> Text:
    """Return a line of ``width`` cells of which ``done / whole`` is heavy."""
    gone = round(width * min(1.0, done / whole))
    heavy, light = ("=", "-") if ascii_only else ("━", "─")
    return _text([(heavy * gone, "cyan"), (light * (width - gone), "dim")])


def _bar(part: float, whole: float, *, width: int, ascii_only: bool) -> str:
    """Return a bar of ``width`` cells, full when part equals whole; in eighths of a cell where the terminal can."""
    eighths = round(8 * width * min(1.0, part / whole)) if whole > 0 else 0
    full, rest = divmod(eighths, 8)
    if ascii_only:
        return ("#" * full).ljust(width)
    return ("█" * full + EIGHTHS[rest]).ljust(width)


def _joined(texts: list[tuple[str, str]], *, ascii_only: bool) -> Text:
    parts = [part for part in texts if part[0]]
    between = (" - " if ascii_only else " · ", "dim")
    return _text([piece for part in parts for piece in (part, between)][:-1])


def _text(parts: list[tuple[str, str]]) -> Text:
    """Return text that is never read as markup: a run or a device may be called ``[red]``."""
    from rich.text import Text

    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


def _note(level: str, text: str) -> Text:
    from rich.text import Text

    return Text(lines.line_of(level, text), style=LEVELS.get(level, ""))


@dataclass(frozen=True)
class TableLine:
    """One line of the table: a worker, or the workers of a group together."""

    label: str
    """Worker or range of workers: ``3``, or ``8-15``."""
    machine: str
    samples: int
    speed: float
    """Samples per second; the sum over a group."""
    waiting: float
    """Part of the time that it waits; the mean over a group."""
    mark: str
    kind: str
    """Kind of the mark: ``late``, ``left``, ``waited for``, ``slowest``, ``joined``, ``sits out`` or nothing."""


def group_rows(rows: Sequence[WorkerRow], *, most: int) -> list[TableLine]:
    """Return at most ``most`` lines, one per worker or per group of neighbours.

    A group's size is a power of two, like the number of workers on a machine, and stays the same as long as the fleet
    and the screen do.
    """
    size = 1 if len(rows) <= MOST_WORKERS else 2
    while -(-len(rows) // size) > max(1, most):
        size *= 2
    return [_line(rows[start : start + size]) for start in range(0, len(rows), size)]


def _line(rows: Sequence[WorkerRow]) -> TableLine:
    first, last = rows[0], rows[-1]
    mark, kind = _mark(rows)
    names = {row.machine for row in rows}
    at_work = [row.waiting for row in rows if row.samples]
    return TableLine(
        label=str(first.worker) if len(rows) == 1 else f"{first.worker}-{last.worker}",
        machine=first.machine if len(names) == 1 else f"{len(names)} kinds of machine",
        samples=sum(row.samples for row in rows),
        speed=sum(row.speed for row in rows),
        waiting=sum(at_work) / len(at_work) if at_work else 0.0,
        mark=mark,
        kind=kind,
    )


def _mark(rows: Sequence[WorkerRow]) -> tuple[str, str]:
    """Return mark and kind: a worker's own, or the one of the group that matters most."""
    if len(rows) == 1:
        return rows[0].mark, "late" if rows[0].late else "left" if rows[0].left else rows[0].mark
    if late := [row for row in rows if row.late]:
        behind = max(row.behind for row in late)
        return f"{len(late)} late" + (f", by {behind} round{'' if behind == 1 else 's'}" if behind else ""), "late"
    if gone := [row for row in rows if row.left]:
        return f"{len(gone)} left", "left"
    for kind in ("waited for", "slowest", "joined"):
        if named := [row.worker for row in rows if row.mark == kind]:
            return f"{named[0]} {kind}", kind
    out = sum(row.mark == "sits out" for row in rows)
    return (f"{out} sit{'s' if out == 1 else ''} out", "sits out") if out else ("", "")
