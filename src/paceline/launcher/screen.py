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
    """Hands the events of a run's log to ``take`` as they are written, on a thread, from `start` to `close`."""

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
    """Prints, and shows the run in ``run_dir`` as its log grows; of the latter the warnings alone when ``quiet``.

    On a terminal the live view takes over sys.stdout and sys.stderr, so that lines printed meanwhile appear above it;
    that is why they are looked up for every line.
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
        """A line of the launcher's own."""
        self.err(f"paceline: {text}\n")

    def note(self, text: str) -> None:
        """A line of the launcher's own that a quiet run does without."""
        if not self._quiet:
            self.say(text)

    def close(self, end: tuple[str, str] | None = None) -> RunLog | None:
        """End the view and print the verdict; returns the run's log, None when the script never joined a fleet.

        ``end``: how the run ended (reason, text), for the log, unless a worker has told it there."""
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
        from paceline.observe.views.plain import WarningsView

        view = None
        try:
            for event in events:
                if event.get("event") == "end" and event.get("reason") == "error":
                    continue  # the launcher says it, once
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
            _silence(stream)  # the terminal is gone: whether that ends the run is for SIGHUP to say, or nohup


def _silence(stream: TextIO) -> None:
    """Point the stream to nowhere: Python would complain about it once more when it ends."""
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
    """As seen from the current folder, if it lies there."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
