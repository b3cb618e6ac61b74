"""The screen of a launched run: the workers' lines, the live view that follows the event log, and the verdict."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from paceline import concurrency

if TYPE_CHECKING:
    from paceline.observe import RunLog
    from paceline.observe.log.reader import Event


class LogFollower:
    """A thread that passes the events of a run's log to ``take`` as they are written, from `start` to `close`."""

    def __init__(self, run_dir: Path, take: Callable[[Iterator[Event]], None], *, poll_s: float = 0.1) -> None:
        self._run_dir, self._take, self._poll_s = run_dir, take, poll_s
        self._stop = concurrency.Event()
        self._thread = concurrency.Thread(target=self._follow, name="paceline-follow", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    def _follow(self) -> None:
        from paceline.observe import follow

        self._take(follow(self._run_dir, stop=self._stop, poll_s=self._poll_s))


class Screen:
    """The launcher's output: printed lines, and the run in ``run_dir`` as its log grows (warnings only if ``quiet``).

    On a terminal the live view replaces sys.stdout and sys.stderr, so that lines printed meanwhile appear above it.
    Therefore both are looked up for every line.
    """

    def __init__(self, run_dir: Path, *, quiet: bool = False) -> None:
        self.broken = False
        """Whether nobody reads the launcher's output any more."""
        self._run_dir, self._quiet = run_dir, quiet
        self._follower = LogFollower(run_dir, self._show)

    def __enter__(self) -> Screen:
        self._follower.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._follower.close()

    def out(self, text: str) -> None:
        self._write(sys.stdout, text)

    def err(self, text: str) -> None:
        self._write(sys.stderr, text)

    def say(self, text: str) -> None:
        """Print a line of the launcher's own."""
        self.err(f"paceline: {text}\n")

    def note(self, text: str) -> None:
        """Print a line of the launcher's own, unless the run is quiet."""
        if not self._quiet:
            self.say(text)

    def close(self, end: tuple[str, str] | None = None) -> RunLog | None:
        """End the view, print the verdict, and return the run's log; None when the script never joined a fleet.

        ``end`` is how the run ended (reason, text). It is logged unless a worker has logged the end already.
        """
        from paceline.observe import read_log, verdict
        from paceline.observe.log.writer import EventLog
        from paceline.observe.words.numbers import wrapped

        self._follower.close()
        try:
            log = read_log(self._run_dir)
            if end is not None and log.end is None:
                file = EventLog(self._run_dir)
                file.write("end", reason=end[0], text=end[1])
                file.close()
                log = read_log(self._run_dir)
        except ValueError:
            remove_empty(self._run_dir)
            return None
        if not self._quiet:
            if log.records:
                self.err(f"\n{wrapped(verdict(log).text, sys.stderr)}\n")
            self.err(f"run folder: {short_path(self._run_dir)}\n")
        return log

    def _show(self, events: Iterator[Event]) -> None:
        from paceline.observe import make_view
        from paceline.observe.views import WarningsView

        view = None
        try:
            for event in events:
                if event.get("event") == "end" and event.get("reason") == "error":
                    continue  # the launcher prints it, once
                view = view or (WarningsView(sys.stderr) if self._quiet else make_view(sys.stderr))
                view.show(event)
        finally:
            if view:
                view.close()

    def _write(self, stream: TextIO, text: str) -> None:
        if self.broken:
            return
        try:
            encoding = getattr(stream, "encoding", None) or "utf-8"
            stream.write(text.encode(encoding, "replace").decode(encoding))
            if text.endswith("\n") or stream in (sys.__stdout__, sys.__stderr__):  # the view ends a line at a flush
                stream.flush()
        except BrokenPipeError:
            self.broken = True
            _silence(stream)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            _silence(stream)  # the terminal is gone: SIGHUP ends the run, unless nohup ignores it


def _silence(stream: TextIO) -> None:
    """Redirect the stream to the null device: else Python reports the broken stream once more when it ends."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def remove_empty(run_dir: Path) -> None:
    """Remove the folder of a run that nobody recorded, and the folder of runs if that leaves it empty."""
    for folder in (run_dir, run_dir.parent):
        try:
            folder.rmdir()
        except OSError:
            return


def short_path(path: Path) -> str:
    """Return the path relative to the current folder, if it lies there, else unchanged."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
