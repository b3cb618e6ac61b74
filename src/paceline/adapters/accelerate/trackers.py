"""Trackers of the worker that leads: started where they are first needed, because another worker may lead later."""

from __future__ import annotations

from typing import Any

import accelerate


class LeadersTrackers(accelerate.Accelerator):
    """An Accelerator whose trackers start on whoever leads."""

    _asked_trackers: tuple[Any, Any] | None = None
    """Arguments of `init_trackers`."""

    def init_trackers(self, *args: Any, **kwargs: Any) -> None:
        """Start all trackers on the main process; a worker that becomes it later starts its own."""
        self._asked_trackers = args, kwargs
        self._start_trackers()

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Log values to all trackers, on the main process."""
        self._start_trackers()
        super().log(*args, **kwargs)

    def get_tracker(self, *args: Any, **kwargs: Any) -> Any:
        """Return a tracker by its name, on the main process."""
        self._start_trackers()
        return super().get_tracker(*args, **kwargs)

    def _start_trackers(self) -> None:
        if self._asked_trackers is not None and self.is_main_process and not self.trackers:
            args, kwargs = self._asked_trackers
            super().init_trackers(*args, **kwargs)
