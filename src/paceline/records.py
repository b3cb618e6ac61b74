"""The plain data that all parts exchange: a step's plan (`Plan`), its record (`StepRecord`), and the history.

The event log is these records as JSON lines; pacers, the simulator and every view read nothing else. Per-worker fields
are tuples in rank order, of equal length.

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
"""Version of the records' JSON format; it stands in the first line of every event log."""

Range = tuple[int, int]
"""Positions ``start <= p < stop`` in an epoch's order."""

T = TypeVar("T", bound="_Json")


class _Json:
    """Conversion of a dataclass to plain JSON types and back; unknown keys from a newer version are ignored."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data, for `json.dumps`."""
        return asdict(self)  # type: ignore[call-overload,no-any-return]

    @classmethod
    def from_json(cls: type[T], data: Mapping[str, Any]) -> T:
        """Return the object that ``to_json`` was called on."""
        known = {f.name for f in fields(cls)}  # type: ignore[arg-type]
        return cls(**{key: _tuples(value) for key, value in data.items() if key in known})


def _tuples(value: Any) -> Any:
    """Return lists as tuples, recursively; a list of numbers, the common case, takes one call."""
    if not isinstance(value, (list, tuple)):
        return value
    return tuple(map(_tuples, value)) if value and isinstance(value[0], (list, tuple)) else tuple(value)


@dataclass(frozen=True)
class Plan(_Json):
    """The shares of one step, and when its round closes."""

    generation: int
    """Number of the fleet, from 0; it grows with every change of members, and a plan of another generation is void."""
    step: int
    """Index of the step."""
    samples: tuple[int, ...]
    """Share of each worker in samples, in rank order; 0 for one that sits out."""
    deadline_s: float | None = None
    """Seconds after the step's start when the round closes with what is finished; None waits for every worker."""
    wait_for: int | None = None
    """Number of workers whose complete shares close the round (P3's cut-off); only complete shares count then.

    None: all finished work counts.
    """
    expects: int | None = None
    """Samples that the step should count; None: all that are dealt."""
    forecast_s: tuple[float, ...] | None = None
    """Seconds of own compute that the pacer expects of each worker under this plan; NaN where it has no forecast."""
    least_count: float = 0.0
    """Part of the global batch that must be counted before the round closes at its deadline; 0: none."""

    @property
    def total(self) -> int:
        """Samples dealt to all workers together."""
        return sum(self.samples)

    @property
    def bounded(self) -> bool:
        """Whether the round closes without waiting for every worker."""
        return self.deadline_s is not None or self.wait_for is not None


def reported(when: str = "always", **default: Any) -> Any:
    """Return a field of `StepRecord` that every worker reports about itself in the round.

    It is a number, of which the record has one per worker.

    Args:
        when: "always", or only in rounds with a "deadline", on "emulated" machines, or "auto" (``micro_batch="auto"``).
        **default: the field's default.
    """
    return field(metadata={"reported": when}, **default)


@dataclass(frozen=True)
class StepRecord(_Json):
    """What happened in one step: equal on every worker after its round, but for ``wall_s`` and ``round_s``."""

    step: int
    """Index of the step, from 0, over all epochs and restarts."""
    epoch: int
    """Number of the epoch, from 0."""
    generation: int
    """Number of the fleet, from 0; it grows with every change of members."""
    workers: tuple[int, ...]
    """Permanent numbers of the workers, in rank order; in a fleet of fixed size, the ranks."""
    planned: tuple[int, ...]
    """Samples dealt to each worker."""
    samples: tuple[int, ...] = reported()
    """Samples that each worker did and that were counted."""
    seconds: tuple[float, ...] = reported()
    """Seconds of own compute of each worker, up to its last local gradient, without waiting; 0 if it sat out."""
    micro_batches: tuple[int, ...] = reported(default=())
    """Micro-batches that each worker finished."""
    slowest_s: tuple[float, ...] = reported(default=())
    """Seconds of the longest single micro-batch of each worker."""
    unfinished_s: tuple[float, ...] = reported("deadline", default=())
    """Seconds that each worker had spent on an unfinished micro-batch when the round closed; 0 when it was done.

    A worker that was stuck through the whole step has 0 samples and all of the step here.
    """
    behind: tuple[int, ...] = reported("deadline", default=())
    """Earlier rounds whose update each worker had yet to take over when the round closed."""
    late_s: tuple[float, ...] = reported(default=())
    """Seconds by which a micro-batch that ended since the last round had overrun its deadline, else 0."""
    forecast_s: tuple[float, ...] | None = None
    """Seconds of own compute that the plan expected of each worker; NaN where there was no forecast."""
    deadline_s: float | None = None
    """Seconds after the step's start at which its round closed; None: it waited for every worker."""
    wait_for: int | None = None
    """Complete shares with which the round closed (P3's cut-off); None: there was no cut-off."""
    wall_s: float = 0.0
    """Seconds from the step's start to the end of its commit, without the user's code between steps.

    They are by the clock of the worker that wrote the record (the leader's in the log).
    """
    round_s: float = 0.0
    """Seconds of ``wall_s`` in the round itself, after the slowest worker had arrived."""
    weight: float = 0.0
    """Sum of the micro-batches' weights: what the gradient was divided by, in samples or in other items."""
    loss: float | None = None
    """Weighted mean loss of the fleet."""
    grad_norm: float | None = None
    """Norm of the mean gradient before clipping, where it was requested."""
    applied: bool = True
    """Whether the update was applied; False after an overflow, or when nothing was done."""
    sums: Mapping[str, float] = field(default_factory=dict)
    """Figures that the user added with ``step.add``, summed over the fleet."""
    ranges: tuple[tuple[Range, ...], ...] = ()
    """Positions of the epoch's order that each worker counted."""
    shortfall_s: tuple[float, ...] = reported("emulated", default=())
    """Seconds by which the host was too slow to emulate each worker's machine."""

    micro_size: tuple[int, ...] = reported("auto", default=())
    """Size of micro-batches that each worker has found with ``micro_batch="auto"``; 0 while it searches."""
    memory_bound: tuple[int, ...] = reported("auto", default=())
    """1 where memory, not speed, bounds that size, else 0."""

    @property
    def total(self) -> int:
        """Samples that all workers together counted."""
        return sum(self.samples)


@dataclass(frozen=True)
class Reported:
    """Type and condition of a number that each worker reports."""

    kind: type
    when: str


REPORTED = {
    one.name: Reported(int if "int" in str(one.type) else float, one.metadata["reported"])
    for one in fields(StepRecord)
    if "reported" in one.metadata
}
"""Reported numbers by name.

The round's header has a slot for each, and a step's record, its readers and the report's columns follow: a new measured
fact is a field of `StepRecord`.
"""


class History:
    """The last ``keep`` records, equal on every worker.

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

    def amend(self, record: StepRecord) -> None:
        """Put a record in the place of the newest, which is of the same step."""
        self._records[-1] = record

    def replace(self, records: Iterable[StepRecord]) -> None:
        """Replace the records by a peer's."""
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


@dataclass(frozen=True)
class LoopSettings:
    """The settings of ``fleet.steps``, as plain numbers."""

    global_batch: int
    """Samples per step, or batches where a batch sampler gives them."""
    micro_batch: int
    """Samples per micro-batch on this worker; 1 where a batch sampler gives the batches."""
    auto: bool
    """Whether the micro-batch is found by measuring, and halved where memory runs out."""
    epochs: int
    shuffle: bool
    drop_last: bool
    multiple_of: int | None = None
    """Samples of which ``drop_last`` leaves a multiple in an epoch; None: the global batch."""

    @property
    def dealt_in(self) -> int:
        """Samples of which an epoch has a multiple."""
        return (self.multiple_of or self.global_batch) if self.drop_last else 1
