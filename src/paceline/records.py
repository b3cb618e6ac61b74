"""The plain data everything speaks in: what a step should be (`Plan`), what it was (`StepRecord`), and all so far.

The event log is these records as JSON lines; pacers, the simulator and every view read nothing else. Per-worker
fields are tuples in rank order, of equal length.

>>> plan = Plan(generation=0, step=3, samples=(96, 32))
>>> Plan.from_json(plan.to_json()) == plan
True
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

LOG_VERSION = 1
"""Version of the records' JSON form; it stands in the first line of every event log."""

Range = tuple[int, int]
"""Positions ``start <= p < stop`` in an epoch's order."""

T = TypeVar("T", bound="_Json")


class _Json:
    """Dataclass to plain JSON types and back; unknown keys from a newer version are ignored."""

    def to_json(self) -> dict[str, Any]:
        """As plain data, for `json.dumps`."""
        return asdict(self)  # type: ignore[call-overload,no-any-return]

    @classmethod
    def from_json(cls: type[T], data: Mapping[str, Any]) -> T:
        """Back from what ``to_json`` gave."""
        known = {f.name for f in fields(cls)}  # type: ignore[arg-type]
        return cls(**{key: _tuples(value) for key, value in data.items() if key in known})


def _tuples(value: Any) -> Any:
    """Lists as tuples, all the way down; a list of numbers, the common case, in one call."""
    if not isinstance(value, (list, tuple)):
        return value
    return tuple(map(_tuples, value)) if value and isinstance(value[0], (list, tuple)) else tuple(value)


@dataclass(frozen=True)
class Plan(_Json):
    """Who does how many samples in one step, until when."""

    generation: int
    """Counts the fleets that members who came and went have made, from 0; a plan of another one is void."""
    step: int
    """The step's index."""
    samples: tuple[int, ...]
    """Each worker's share, in rank order; 0 for one that sits out."""
    deadline_s: float | None = None
    """Seconds after the step's start when the round closes with what is finished; None: it waits for everybody."""
    wait_for: int | None = None
    """P3's cut-off: the round closes when so many workers have done their whole share, and only whole shares count;
    None: all finished work counts."""
    expects: int | None = None
    """Samples the step should count; None: all that are dealt."""
    forecast_s: tuple[float, ...] | None = None
    """Own-compute seconds the pacer expects of each worker under this plan; NaN where it knows nothing."""
    least_count: float = 0.0
    """The round does not close at its deadline before this part of the global batch is counted; 0: it does."""

    @property
    def total(self) -> int:
        """Samples dealt to the whole fleet."""
        return sum(self.samples)

    @property
    def bounded(self) -> bool:
        """Whether the round closes without everybody."""
        return self.deadline_s is not None or self.wait_for is not None


def reported(when: str = "always", **default: Any) -> Any:
    """A field of `StepRecord` that every worker reports of itself in the round: a number, of which the record has one
    for each worker. ``when``: "always", or only in rounds with a "deadline", on "emulated" machines, or with
    ``micro_batch="auto"``."""
    return field(metadata={"reported": when}, **default)


@dataclass(frozen=True)
class StepRecord(_Json):
    """What happened in one step: the same on every worker after its round, but for ``wall_s`` and ``round_s``."""

    step: int
    """The step's index, from 0, over all epochs and restarts."""
    epoch: int
    """From 0."""
    generation: int
    """Counts the fleets that members who came and went have made, from 0."""
    workers: tuple[int, ...]
    """Stable identities, in rank order; in a fleet of fixed size, the ranks."""
    planned: tuple[int, ...]
    """Samples dealt to each worker."""
    samples: tuple[int, ...] = reported()
    """Samples done and counted."""
    seconds: tuple[float, ...] = reported()
    """Own compute, up to the last local gradient; never waiting for others. 0 for a worker that sat out."""
    micro_batches: tuple[int, ...] = reported(default=())
    """How many micro-batches each worker finished."""
    slowest_s: tuple[float, ...] = reported(default=())
    """The longest single micro-batch of each worker."""
    unfinished_s: tuple[float, ...] = reported("deadline", default=())
    """When the round closed: seconds each worker had spent on a micro-batch it had not finished; 0 when it was done.
    A worker that was stuck through the whole step has 0 samples and all of the step here."""
    behind: tuple[int, ...] = reported("deadline", default=())
    """When the round closed: earlier rounds whose update the worker had yet to take over."""
    late_s: tuple[float, ...] = reported(default=())
    """Seconds by which a micro-batch that ended since the last round had overrun its deadline, else 0."""
    forecast_s: tuple[float, ...] | None = None
    """Seconds of own compute that the plan expected of each worker; NaN where nothing was known."""
    deadline_s: float | None = None
    """Seconds after the step's start at which its round closed; None: it waited for everybody."""
    wait_for: int | None = None
    """Whole shares with which the round closed (P3's cut-off); None: there was no cut-off."""
    wall_s: float = 0.0
    """From the step's start to the end of its commit, by the clock of the worker that wrote the record (the leader's
    in the log); time the user's code spends between steps is not in it."""
    round_s: float = 0.0
    """Of that, the round itself: what is left of this worker's wait once the slowest had arrived."""
    weight: float = 0.0
    """Sum of the micro-batches' weights: what the gradient was divided by, in samples or in other items."""
    loss: float | None = None
    """The fleet's weighted mean loss."""
    grad_norm: float | None = None
    """Norm of the mean gradient before clipping, where somebody asked for it."""
    applied: bool = True
    """False when the update was skipped (an overflow, nothing done)."""
    sums: Mapping[str, float] = field(default_factory=dict)
    """Figures the user added with ``step.add``, summed over the fleet."""
    ranges: tuple[tuple[Range, ...], ...] = ()
    """Positions of the epoch's order that each worker counted."""
    shortfall_s: tuple[float, ...] = reported("emulated", default=())
    """Emulated machines: seconds by which the host was too slow to play the machine."""

    micro_size: tuple[int, ...] = reported("auto", default=())
    """``micro_batch="auto"``: the size that each worker has found; 0 while it looks for one."""
    memory_bound: tuple[int, ...] = reported("auto", default=())
    """The same: 1 where memory, not speed, bounds that size, else 0."""

    @property
    def total(self) -> int:
        """Samples that the whole fleet counted."""
        return sum(self.samples)


@dataclass(frozen=True)
class Reported:
    """What a worker reports of itself."""

    kind: type
    when: str


REPORTED = {
    one.name: Reported(int if "int" in str(one.type) else float, one.metadata["reported"])
    for one in fields(StepRecord)
    if "reported" in one.metadata
}
"""By name. The round's header has a place for each, and a step's record, its readers and the report's columns follow:
a new measured fact is a field of `StepRecord`."""


class History:
    """The records so far (the last ``keep`` of them), the same on every worker.

    >>> history = History(keep=2)
    >>> for step in range(3):
    ...     history.append(StepRecord(step, 0, 0, workers=(0,), planned=(8,), samples=(8,), seconds=(0.1,)))
    >>> [record.step for record in history], history[-1].total
    ([1, 2], 8)
    """

    def __init__(self, keep: int = 1000) -> None:
        self._records: deque[StepRecord] = deque(maxlen=keep)

    def append(self, record: StepRecord) -> None:
        """Add the newest record; the oldest goes when there are more than ``keep``."""
        self._records.append(record)

    def replace(self, records: Iterable[StepRecord]) -> None:
        """A peer's records instead of one's own."""
        self._records = deque(records, maxlen=self._records.maxlen)

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(tuple(self._records))  # another thread may append meanwhile

    def __getitem__(self, index: int) -> StepRecord:
        return self._records[index]

    @property
    def last(self) -> StepRecord | None:
        """The newest record; None before the first step."""
        return self._records[-1] if self._records else None
