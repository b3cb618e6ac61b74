"""The number of the last step that a run has logged, as soon as it is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

POLL_S = 0.05


class Steps:
    """While open and ``active``, ``latest`` follows the log in ``run_dir``; ``wake`` is called when it has grown."""

    def __init__(self, run_dir: Path, *, wake: Callable[[], None], active: bool = True) -> None:
        self.latest = -1
        self._run_dir, self._wake, self._active = run_dir, wake, active
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="paceline-steps", daemon=True)

    def __enter__(self) -> Steps:
        if self._active:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    def _follow(self) -> None:
        from paceline.observe import follow

        for event in follow(self._run_dir, stop=self._stop, poll_s=POLL_S):
            step = event.get("step") if event["event"] == "step" else None
            if isinstance(step, int) and step > self.latest:
                self.latest = step
                self._wake()
