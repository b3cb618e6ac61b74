"""What a pacer is: it observes records and answers the question "how is the next step split?". And the paces by name.

Pacers are pure: no clock, no torch, no I/O. Every worker's pacer observes every record; only the leader's is
asked for plans, and ``plan`` changes nothing, so any worker can become the leader. The simulator asks the very
same objects.

There is one list of paces. `register` adds one; whatever takes a name reads this list.

    @register
    class Mine:
        name = "mine"
        ...

From then on ``paceline.join(pace="mine")``, the simulator's table, the what-if and the reports know it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol, TypeVar, runtime_checkable

from paceline.pace.forecast import Forecast, Learner
from paceline.pace.plug_ins import Registry, complete
from paceline.records import Plan, StepRecord

Played = Literal["arrivals", "shares", "rounds"]
"""Ways in which the simulator plays a pacer.

Its plans state how many complete shares a step waits for, or everybody's share, or what is done micro-batch by
micro-batch until a deadline.
"""


@dataclass(frozen=True)
class Ask:
    """The question put to a pacer: split ``total`` samples among ``workers``."""

    step: int
    total: int
    """Samples the step should count: the global batch (with what earlier deadlines left owing), or what the epoch has
    left. Without a deadline the shares add up to it; with one they are more, and it is what is expected."""
    workers: tuple[int, ...]
    """Stable identities in rank order. A pacer that meets a new one starts it from a prior."""
    epoch: int = 0
    generation: int = 0
    unit: int = 1
    """Shares are multiples of this many samples, but for the one remainder."""
    minimum: int | tuple[int, ...] = 0
    maximum: int | tuple[int, ...] | None = None
    last: bool = False
    """Whether nothing of the epoch is left after this step if all of ``total`` is done."""
    deadlines: bool = True
    """Whether the step may have a deadline. A pace that cannot do without is not asked where none may be."""


@dataclass(frozen=True)
class Traits:
    """Facts of a pace, besides its plans, for the simulator, the verdict and the what-if."""

    usage: str = ""
    """Spelling of the pace in ``pace=`` where its name alone is not enough."""
    equal_shares: bool = False
    """All are dealt the same and waited for, as in plain data-parallel training: what other paces are compared with."""
    follows_speed: bool = False
    """Shares follow every worker's speed step by step. Where they do not and a worker holds the others back, the
    verdict advises the default pace."""
    if_stalled: str = ""
    """The pace that the verdict advises when the others are held up now and then."""
    if_cut: str = ""
    """The pace that the verdict advises when work is cut off and done again."""
    played: Played | None = None
    """Way in which the simulator plays the pace; left out: "rounds" for one that sets deadlines, else "shares"."""
    shown: bool = True
    """The simulator's page draws the pace at once; otherwise its line waits in the legend."""


@dataclass(frozen=True)
class PaceChange:
    """The log's ``pace`` event: the pace began to plan deadlines, or no longer does."""

    step: int
    """The step whose record made the change."""
    deadlines: bool
    saves: float
    """The fraction of the time of waiting for everybody that deadlines save, by the last steps."""
    worker: int | None
    """The one worker that was waited for during more than half of that time; None: several were, or deadlines ended."""


@runtime_checkable
class MinimalPacer(Protocol):
    """The methods that a class must have to be a pacer; `Pacer` lists what it may have besides."""

    name: str
    """Name in ``pace=``, the log and checkpoints."""

    def check(self, workers: int) -> None:
        """Raise ValueError when the settings make no sense for this number of workers.

        Called only where the workers stay the same. In a fleet whose members change, settings that name workers belong
        to identities.
        """

    def observe(self, record: StepRecord) -> None:
        """Learn from a step; every worker's pacer observes every step, in order."""

    def plan(self, ask: Ask) -> Plan:
        """Split the step that is asked about; changes nothing."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what it has learned, as plain data: saved with every checkpoint."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what another pacer of this kind had learned."""


class Pacer(MinimalPacer, Protocol):
    """A rule that decides the shares. ``plan`` is a pure function of what was observed.

    Everything below the methods of `MinimalPacer` has a default: a class may leave it out, or inherit it from here.
    """

    deadlines: ClassVar[bool] = False
    """Whether its plans may close a round without everybody."""
    does_without: ClassVar[bool] = False
    """Whether it plans no deadline where a step may have none (`Ask.deadlines`)."""
    traits: ClassVar[Traits] = Traits()
    """Facts of it for reports and the simulator."""
    change: PaceChange | None = None
    """The last change of pace that this object made; None before the first."""
    keep_batch: bool = True
    """Whether later steps make up for samples that a step left undone; otherwise each is dealt one global batch."""
    overhead_s: float | None = None
    """The round's own seconds that it was given for its plans; None: it measures them, or does not use them."""

    @classmethod
    def from_text(cls, pace: str) -> Pacer:
        """Return the pacer that ``pace=`` stands for, settings after a colon included."""
        if pace.partition(":")[2]:
            raise UnknownSettings(pace)
        return cls()

    @classmethod
    def simulated(cls, *, seed: int, forecast: Forecast | None = None) -> Sequence[Simulated]:
        """Return the simulator's rows of this pace: one, of the pace as it is.

        ``seed`` is that of its draws; ``forecast`` is tried besides the usual ones by a pace that forecasts.
        """
        return [Simulated(cls.name, cls())]

    def recount(self, ask: Ask, share: int) -> int | None:
        """Return how many complete shares close the open step, of at most ``share`` samples; None: as planned.

        Asked on the leader while the step runs, with every record observed, where the plan's `Plan.wait_for` was made a
        step earlier. Changes nothing.
        """
        return None

    def learner(self) -> Learner | None:
        """Return what learns from the run while it goes on, on the leader; None for a pace that learns by itself."""
        return None


class UnknownSettings(ValueError):
    """A name with settings after a colon, for a class that takes none."""


@dataclass(frozen=True)
class Simulated:
    """A row of the simulator's table: a pacer that has seen nothing yet."""

    name: str
    pacer: Pacer
    as_chosen: bool = True
    """The pace as ``pace=`` with its name gives it, which the what-if may advise; otherwise a variant."""
    cut_to_fit: bool = True
    """Whether micro-batches are cut, before a deadline, to what still fits."""


def completed(kind: type[Any]) -> type[Pacer]:
    """Return the class, with the defaults of `Pacer` for everything it leaves out."""
    complete(kind, Pacer)
    return kind


def played(kind: type[Pacer]) -> Played:
    """Return how the simulator plays the pace."""
    return kind.traits.played or ("rounds" if kind.deadlines else "shares")


def rows(kind: type[Pacer], *, seed: int = 0, forecast: Forecast | None = None) -> Sequence[Simulated]:
    """Return the simulator's rows of a pace."""
    return kind.simulated(seed=seed, forecast=forecast)


def may_set_deadlines(pacer: Pacer) -> bool:
    """Return whether the pacer's plans may close rounds without everybody."""
    return pacer.deadlines


def deadlines_needed(pacer: Pacer) -> bool:
    """Return whether the pacer's plans may have deadlines whatever `Ask.deadlines` says."""
    return pacer.deadlines and not pacer.does_without


PACES: Registry[type[Pacer]] = Registry()
Kind = TypeVar("Kind", bound=MinimalPacer)


def register(kind: type[Kind]) -> type[Kind]:
    """Make the class known by its ``name``; returns it, so that this is a decorator too.

    A name stands for ``kind()``, or for ``kind.from_text("name:settings")`` where the class has that method.
    """
    name = getattr(kind, "name", None)
    if not isinstance(kind, type) or not isinstance(name, str) or not name or set(name) & set(": ,"):
        raise ValueError(f"a pace is a class with a name such as 'mine', not {kind!r} with the name {name!r}")
    other = PACES.loaded().get(name, kind)
    if other is not kind:
        raise ValueError(f"there is a pace {name!r} already, {other.__name__}: take another name")
    PACES.add(name, completed(kind))
    return kind


def registered() -> Mapping[str, type[Pacer]]:
    """Return all paces by name, in the order in which they were registered; plug-ins only where installed."""
    return MappingProxyType(PACES.present())


def traits_of(name: str) -> Traits:
    """Return the traits of the pace of this name; the defaults for an unknown one."""
    kind = PACES.get(name)
    return Traits() if kind is None else kind.traits


def baseline() -> type[Pacer]:
    """Return the pace that the others are compared with: equal shares, and everybody is waited for."""
    return next(kind for kind in PACES.loaded().values() if kind.traits.equal_shares)


def make(pace: str | MinimalPacer) -> Pacer:
    """Return a pacer from its name or from itself.

    >>> make("fixed:1,1,2")
    Fixed([1.0, 1.0, 2.0])
    """
    if isinstance(pace, MinimalPacer) and not isinstance(pace, type):
        completed(type(pace))
        return pace  # type: ignore[return-value]
    if not isinstance(pace, str):
        raise ValueError(f"pace must be a name or a pacer such as Adaptive(), not {pace!r}. Known names: {_known()}")
    kind = PACES.get(pace.strip().partition(":")[0])
    try:
        if kind is not None:
            return kind.from_text(pace)
    except UnknownSettings:
        pass
    raise ValueError(f"unknown pace {pace!r}. Known names: {_known()}")


def _known() -> str:
    loaded = PACES.loaded()
    return ", ".join((loaded[name].traits.usage if name in loaded else "") or name for name in PACES.names())
