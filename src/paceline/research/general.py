"""General: a forecast that was made beforehand, from simulated clusters, and needs no training on this one.

Eight simple experts look at the last 48 steps (`paceline.research.experts`), and a small learned network weighs them
for each worker (`paceline.research.gate`). See docs/research.md.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.pace.forecast import Floats, Forecast, Seen, moved, register, same_workers
from paceline.research.gate import Gate, LogMixture, shipped, spread_evenly

WINDOW = 48
"""Steps it looks at."""
BACKLOG = 32
"""Steps kept to be taken in when a draw is asked for; older ones are taken in without a belief."""
NO_NEWS = 3.0
"""A bound so far (natural log) below what is believed says nothing, as of a stuck worker: that stays as it was."""
ALONE = 0.3
"""Weight of a worker's own luck beside what it shares with those whose times changed together with its own."""


class General(Forecast):
    """Joint draws of the next step for any number of workers, from the first step on.

    A worker's log seconds are a mixture of what the experts expect. Workers whose times changed in the same steps, as
    those of a node, get the same part of their mixtures in most draws: the ranks of ``sum_t e_t (y_t - y_(t-1))`` with
    random ``e_t`` choose it. A worker cut off at t enters the window with the median of x given x > t.

    ``ahead`` says which step is drawn: 1 the next one, 2 the one after it, as where plans are made a step early.

    It is a function of the window alone: nothing else is learned, and nothing random is kept. The work is left to the
    next `draw`, which happens while a step computes.
    """

    name = "general"

    def __init__(self, gate: Gate | None = None) -> None:
        self._gate = shipped() if gate is None else gate
        self._logs = np.zeros((0, 0))
        self._hidden = np.zeros((0, 0), dtype=np.bool_)
        self.ahead = 1
        self._backlog: deque[Seen] = deque()
        self._belief: LogMixture | None = None

    def look_ahead(self, steps: int) -> None:
        """Draw the step that comes this many steps after the last observed one."""
        self.ahead = steps

    @property
    def workers(self) -> int | None:
        """Columns; None before anything was observed."""
        return None if self.newest is None else len(self.newest)

    @property
    def newest(self) -> Floats | None:
        """A value of every worker's last step."""
        if self._backlog:
            return self._backlog[-1].seconds
        return self._logs[-1] if len(self._logs) else None

    def observe(self, seen: Seen) -> None:
        same_workers(self.newest, seen)
        self._backlog.append(seen)
        if len(self._backlog) > BACKLOG:
            self._take_in(self._backlog.popleft(), believing=False)

    def draw(self, rows: int, rng: np.random.Generator) -> Floats:
        self._catch_up()
        belief = self.belief() if self.ahead == 1 else self._gate.believe(self._logs, self._hidden, self.ahead)
        return np.asarray(np.exp(belief.draw(_together(self._logs, rows, rng), rng)))

    def draw_early(self, rows: int, rng: np.random.Generator) -> Floats:
        """Draw the step after the newest, without knowing the newest: two steps ahead."""
        self._catch_up()
        known = max(len(self._logs) - 1, 1)
        logs, hidden = self._logs[:known], self._hidden[:known]
        belief = self._gate.believe(logs, hidden, 2)
        return np.asarray(np.exp(belief.draw(_together(logs, rows, rng), rng)))

    def belief(self) -> LogMixture:
        """Return what is believed of the next step. Raises ValueError before anything was observed."""
        self._catch_up()
        if self._belief is None:
            self._belief = self._gate.believe(self._logs, self._hidden)
        return self._belief

    def beyond(self, seen: Seen) -> Floats:
        """Return a step's log seconds as they enter the window: for those cut off, the median beyond the cut-off."""
        return self._beyond(seen, None if self.workers is None or not seen.late.any() else self.belief())

    def rearrange(self, sources: Sequence[int], seconds: Floats | None = None) -> None:
        """Follow a change of members: the new column i was column ``sources[i]``.

        A new worker (-1) has always been at ``seconds[i]`` or, without that, is a typical one.
        """
        if self.workers is None:
            return
        self._catch_up()
        start = np.median(self._logs, axis=1)[:, None] if seconds is None else np.log(seconds)
        # In one layout whatever happened: sums, and so draws, are those of a forecast that was saved and loaded.
        self._logs = np.ascontiguousarray(moved(self._logs, sources, start))
        self._hidden = np.ascontiguousarray(moved(self._hidden.astype(np.float64), sources, 0.0) > 0)
        self._belief = None

    def state_dict(self) -> dict[str, Any]:
        if self.workers is not None:
            self._catch_up()
        arrays = self._logs.astype("<f8"), self._hidden.astype("<u1")
        logs, hidden = (b64encode(each.tobytes()).decode() for each in arrays)
        return {"shape": list(self._logs.shape), "logs": logs, "hidden": hidden}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._backlog.clear()
        kinds = (("logs", "<f8"), ("hidden", "<u1"))
        logs, hidden = (np.frombuffer(b64decode(state[name]), kind).reshape(state["shape"]) for name, kind in kinds)
        self._logs, self._hidden = logs.astype(np.float64), hidden.astype(np.bool_)
        self._belief = None

    def _catch_up(self) -> None:
        while self._backlog:
            self._take_in(self._backlog.popleft(), believing=True)
        if not len(self._logs):
            raise ValueError("nothing was observed yet: a forecast needs one step")

    def _take_in(self, seen: Seen, *, believing: bool) -> None:
        if not len(self._logs):
            self._logs, self._hidden = np.log(seen.seconds)[None], seen.late[None]
            return
        if believing and seen.late.any() and self._belief is None:
            self._belief = self._gate.believe(self._logs, self._hidden)
        row = self._beyond(seen, self._belief if believing else None)
        hidden = seen.late & (row < np.log(seen.seconds) + NO_NEWS)
        self._logs = np.concatenate([self._logs[1 - WINDOW :], row[None]])
        self._hidden = np.concatenate([self._hidden[1 - WINDOW :], hidden[None]])
        self._belief = None

    def _beyond(self, seen: Seen, belief: LogMixture | None) -> Floats:
        row = np.log(seen.seconds)
        if belief is not None and seen.late.any():
            row[seen.late] = belief.beyond(row, seen.late)
        elif len(self._logs):
            row = np.where(seen.late, np.maximum(row, self._logs[-1]), row)
        return row


def _together(logs: Floats, rows: int, rng: np.random.Generator) -> Floats:
    """Draw uniform numbers, rows x workers: one in each of ``rows`` equal parts for every worker.

    Workers whose times changed together share their order.
    """
    workers = logs.shape[1]
    luck = ALONE * rng.standard_normal((rows, workers))
    change = np.diff(logs, axis=0)
    if len(change) > 1:
        size = np.sqrt((change**2).sum(axis=0))
        # Squares, signs kept: one step or two make the most of a draw, so that what happened together stays together.
        weight = rng.standard_normal((rows, len(change)))
        luck += (weight * np.abs(weight)) @ (change / np.maximum(size, 1e-9))
    return spread_evenly(luck, rng)


register(General.name, General)
