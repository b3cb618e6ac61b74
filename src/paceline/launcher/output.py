"""The workers' output: worker 0's lines are printed unchanged, the others' with their number in front.

Error messages are held back. A traceback, a usage message or a ``paceline: `` line may be the last that a worker
writes, and when one worker fails the others soon follow with the same lines or with complaints about the first. So from
such a line on, a worker's stderr is held until the worker ends, or for two seconds if it lives on: a process that has
loaded torch takes most of a second to end.
"""

from __future__ import annotations

import re
from collections.abc import Callable

HOLD_S = 2.0
MOST_HELD = 5000
"""The most lines that are held back; a worker that writes more lives on."""
PARTIAL_S = 0.1
"""Time after which worker 0's unfinished line (a progress bar, a prompt) is printed."""

ERROR_START = re.compile(r'.*Traceback \(most recent call last\):$|  File "[^"]*", line \d+$|paceline: |usage: ')
ENGINE_PREFIX = re.compile(r"^\[rank\d+\]: ?")
"""The prefix of torch.distributed before each line of a traceback; the launcher has a prefix of its own."""


class OutputStream:
    """Stdout or stderr of one worker, cut into lines; ``out`` receives text ready to print, line ends included."""

    def __init__(self, number: int, out: Callable[[str], None], *, holds: bool) -> None:
        self.held: list[str] = []
        """Lines held back, without prefix and line end."""
        self.held_since: float | None = None
        self.shown: list[str] = []
        """The lines that were held back last, and then printed because the worker lived on."""
        self.shown_since: float | None = None
        self._number, self._out, self._holds = number, out, holds
        self._partial = b""
        self._partial_since = 0.0
        self._mid_line = False

    def feed(self, data: bytes, now: float) -> None:
        *lines, rest = (self._partial + data).split(b"\n")
        for line in lines:
            self._line(line.decode(errors="replace").removesuffix("\r"), now)
        self._partial_since = now if lines or not self._partial else self._partial_since
        self._partial = rest

    def tick(self, now: float, *, failing: bool) -> None:
        """Print what has waited long enough; while the fleet is failing, held lines wait for the worker's end."""
        if self.held_since is not None and not failing and now - self.held_since > HOLD_S:
            self.release()
        if self._number == 0 and self._partial and self.held_since is None and now - self._partial_since > PARTIAL_S:
            self._show_partial(self._partial.decode(errors="replace"))

    def _show_partial(self, text: str) -> None:
        if not (self._holds and ERROR_START.match(text)):  # else it is held back, once the line is complete
            self._out(text)
            self._partial, self._mid_line = b"", True

    def close(self, now: float) -> None:
        """End the stream: an unfinished line counts as a line."""
        if self._partial:
            self.feed(b"\n", now)

    def release(self) -> None:
        """Print the lines that were held back."""
        self.shown, self.shown_since = self.held, self.held_since
        self.held, self.held_since = [], None
        for line in self.shown:
            self._print(line)

    def _line(self, text: str, now: float) -> None:
        text = ENGINE_PREFIX.sub("", text) if self._holds else text
        if self.held_since is None and not (self._holds and ERROR_START.match(text)):
            self._print(text)
            return
        self.held_since = now if self.held_since is None else self.held_since
        self.held.append(text)
        if len(self.held) > MOST_HELD:
            self.release()

    def _print(self, text: str) -> None:
        if self._number:
            text = text.rpartition("\r")[2]  # the last state of a progress bar, as a terminal would show it
        self._out(f"{text}\n" if self._mid_line else prefixed(self._number, text))
        self._mid_line = False


def prefixed(number: int, text: str) -> str:
    r"""Return a worker's line as it is printed.

    >>> prefixed(2, "loss 0.3")
    '[2] loss 0.3\n'
    """
    return f"[{number}] {text}\n" if number else f"{text}\n"


def headline(lines: list[str]) -> str:
    """Return the most telling line of an error message: the one with the exception's name, else the last line.

    >>> headline(["Traceback (most recent call last):", '  File "a.py", line 1', "ValueError: no", "a warning"])
    'ValueError: no'
    """
    starts = [i for i, line in enumerate(lines) if line.endswith("Traceback (most recent call last):")]
    after = lines[starts[-1] + 1 :] if starts else []
    unindented = [line for line in after if line.strip() and not line.startswith(" ")]
    return (unindented or [line for line in reversed(lines) if line.strip()] or [""])[0].strip()
