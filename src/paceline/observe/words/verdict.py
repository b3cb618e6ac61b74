"""The closing verdict: how fast, how far from the limit, who held the fleet back, and what to change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from paceline.observe.analysis.audit import audit
from paceline.observe.analysis.figures import Figures, WorkerFigures, own_speeds, summarise
from paceline.observe.analysis.wire import Rounds, rounds_of
from paceline.observe.log.reader import RunLog
from paceline.observe.words.audit import audit_verdict
from paceline.observe.words.deadlines import SAME, deadline_sentences, with_deadlines
from paceline.observe.words.membership import Move, moves, moves_text
from paceline.observe.words.numbers import capital, duration, machines, number, percent, size, times, worker_name
from paceline.observe.words.pace_changes import Switch, switches, switches_text
from paceline.observe.words.sizes import FoundSize, found_sizes, sizes_text
from paceline.observe.words.wire import advice_text, precision_text
from paceline.pace import DEFAULT, WAITING, Traits, traits_of
from paceline.records import StepRecord

WARM_UP = 5
"""Steps left out at the start, but never more than a quarter of them: caches are cold and shares not found yet."""
BALANCED = 0.05
"""Waiting below this is no news."""
UNLIKE = 1.25
"""The fastest worker's speed over the slowest's from which machines count as unlike."""
NOTABLE = 0.10
"""A part of the time from which it is worth a sentence."""
ENOUGH = 20
"""Steps from which a round's time is known well enough to say that a machine is not worth it."""
WORTH = 0.02
"""Of the fleet's speed, what a worker must cost it to be worth a sentence: a round's time is no more exact."""


@dataclass(frozen=True)
class Reach:
    """Another pace that the figures speak for, and the samples a second that it may come to."""

    pace: str
    samples_per_s: float


@dataclass(frozen=True)
class Verdict:
    """The numbers of a run and, as `text`, what they mean."""

    figures: Figures
    """After warm-up; `paceline.observe.analysis.figures` has the formulas."""
    warm_up: int = 0
    """Steps left out at the start."""
    pace: str = ""
    machines: Mapping[int, str] = field(default_factory=dict)
    skipped_updates: int = 0
    """Steps of the whole run whose update was not applied."""
    outside: float = 0.0
    """Of the time from the first of these steps to the last, what passed between steps (evaluation, own code)."""
    moves: Sequence[Move] = ()
    """Who left and who joined in the whole run, in order."""
    switches: Sequence[Switch] = ()
    """When the pace began deadlines and ended them, in order."""
    audit: str = ""
    """Of an elastic run: whether every sample counted once, in words."""
    rounds: Rounds | None = None
    """What the log says of the rounds; None: nothing of their bytes."""
    sizes: Mapping[int, FoundSize] = field(default_factory=dict)
    """What ``micro_batch="auto"`` found, by worker; empty where the size was given."""

    @property
    def traits(self) -> Traits:
        """What the run's pace says of itself."""
        return traits_of(self.pace)

    def name(self, worker: WorkerFigures) -> str:
        """A worker as people know it, in the middle of a sentence."""
        return worker_name(worker.worker, self.machines.get(worker.worker))

    def too_coarse(self, worker: WorkerFigures) -> bool:
        """Whether a smaller micro_batch would help: it does one or two a step, and the script chose the size."""
        return few_micro_batches(worker) and not self.sizes

    @property
    def over_equal(self) -> float:
        """Speed over what equal shares would have given; 0 when unknown."""
        return self.figures.samples_per_s / self.figures.equal if self.figures.equal > 0 else 0.0

    @property
    def too_short(self) -> bool:
        """Whether the first steps, cold and with shares not found yet, are all there is: no ground for advice."""
        return not self.warm_up

    @cached_property
    def held_back_by(self) -> int | None:
        """The worker behind most of the waiting; None when shares are balanced, all took turns, a deadline spared them
        the wait, or the run was too short to tell."""
        if self.too_short or with_deadlines(self.figures):
            return None
        culprit = max(self.figures.workers, key=lambda w: w.blamed, default=None)
        blame = sum(w.blamed for w in self.figures.workers)
        named = culprit is not None and blame > BALANCED and culprit.blamed > blame / 2
        return culprit.worker if culprit is not None and named else None

    @cached_property
    def in_reach(self) -> Reach | None:
        """The pace that `text` advises; None when it advises none."""
        f = self.figures
        if self.too_short or len(f.workers) < 2 or not f.samples_per_s:
            return None
        if with_deadlines(f):
            return Reach(WAITING, f.patient) if f.patient * (1 - SAME) > f.samples_per_s else None
        if f.balanced < f.samples_per_s * (1 + NOTABLE):
            return None
        if self.traits.equal_shares:
            return Reach(DEFAULT, f.balanced)
        return Reach(self.traits.if_stalled, f.balanced) if self.traits.if_stalled and _held_up(self) else None

    @property
    def text(self) -> str:
        """A few plain sentences, one subject a line."""
        return "\n".join(_sentences(self))

    def to_json(self) -> dict[str, Any]:
        """All numbers as plain JSON types, the text included."""
        own = {"warm_up": self.warm_up, "pace": self.pace, "over_equal": self.over_equal}
        own |= {"held_back_by": self.held_back_by, "skipped_updates": self.skipped_updates, "outside": self.outside}
        own |= (
            {"moves": [move.to_json() for move in self.moves], "audit": self.audit} if self.audit or self.moves else {}
        )
        own |= {"switches": [switch.to_json() for switch in self.switches]} if self.switches else {}
        own |= {"rounds": asdict(self.rounds)} if self.rounds is not None else {}
        own |= {"micro_sizes": {worker: found.samples for worker, found in self.sizes.items()}} if self.sizes else {}
        figures = asdict(self.figures)
        rows = [{**row, "machine": self.machines.get(row["worker"], "")} for row in figures.pop("workers")]
        return {**figures, **own, "workers": rows, "text": self.text}


def verdict(
    source: RunLog | Iterable[StepRecord], *, run: Mapping[str, Any] | None = None, whole: bool = True
) -> Verdict:
    """Judge a run from its log, or from its records and, when at hand, its ``run`` event.

    ``whole``: the log holds all records of the run, so that an elastic one can be audited.
    """
    log = source if isinstance(source, RunLog) else RunLog(path=Path(), records=tuple(source))
    records, info = log.records, run or log.run
    warm_up = min(WARM_UP, len(records) // 4)
    return Verdict(
        figures=summarise(records[warm_up:], known=own_speeds(records[:warm_up])),
        warm_up=warm_up,
        pace=str(info.get("pace") or ""),
        machines=machines(info) if run else log.machines,
        skipped_updates=sum(not record.applied for record in records),
        outside=_outside(records[warm_up:], log.times[warm_up:]),
        moves=moves(log.changes, records, log.times),
        switches=switches(log.others),
        audit=audit_verdict(audit(log)) if whole and log.elastic and records else "",
        rounds=rounds_of(info, log.loops),
        sizes=found_sizes(records),
    )


def _outside(records: Sequence[StepRecord], stamps: Sequence[float]) -> float:
    """A step is stamped at its end, so the span from the first stamp to the last holds all steps but the first."""
    span = stamps[-1] - stamps[0] if len(stamps) > 1 else 0.0
    inside = sum(record.wall_s for record in records[1:])
    return max(0.0, 1 - inside / span) if span > 0 else 0.0


def _sentences(v: Verdict) -> list[str]:
    if not v.figures.steps:
        return ["No steps were recorded, so there is nothing to judge."]
    if not v.figures.samples_per_s:
        nothing = f"{steps_text(v.figures.steps)}, but no samples or no times in the record: there is nothing to judge."
        return [sentence for sentence in (nothing, moves_text(v.moves), v.audit) if sentence]
    if v.too_short:
        said = [_speed(v), _only_warm_up(v), switches_text(v.switches), sizes_text(v.sizes), _skipped(v)]
        said += [moves_text(v.moves), v.audit]
        return [sentence for sentence in said if sentence]
    if with_deadlines(v.figures):
        middle = [*deadline_sentences(v.figures, v.pace, v.name), _idle(v).strip()]
    else:
        middle = [_equal_shares(v), _who(v), _not_worth(v)]
    more = [_where(v), precision_text(v.rounds), sizes_text(v.sizes), _shortfall(v), _skipped(v)]
    more += [moves_text(v.moves), v.audit]
    said = [_speed(v), switches_text(v.switches), *middle, *more]
    return [sentence for sentence in said if sentence]


def _speed(v: Verdict) -> str:
    f = v.figures
    few = f"{steps_text(f.steps)} only, warm-up included: " if v.too_short else ""
    if not f.limit:
        return f"{few}{number(f.samples_per_s)} samples/s; the workers' own times are not in the record."
    speed = f"{few}{number(f.samples_per_s)} samples/s"
    if len(f.workers) == 1:
        return f"{speed} on one machine, {percent(f.of_limit)} of its own compute speed ({number(f.limit)})."
    stuck = f", stuck {percent(f.stuck)} of the time," if f.stuck >= 0.01 else ""
    these = f"these {f.most} machines" if f.fewest == f.most else f"the {size(f.fewest, f.most)} machines then there"
    return f"{speed}, {percent(f.of_limit)} of what {these}{stuck} can do together ({number(f.limit)})."


def _only_warm_up(v: Verdict) -> str:
    who = "who held the fleet back or " if len(v.figures.workers) > 1 else ""
    return f"Too short to tell {who}what to change."


def _equal_shares(v: Verdict) -> str:
    f = v.figures
    if len(f.workers) < 2 or not f.equal:
        return ""
    gain, reach = v.over_equal, f.balanced / f.samples_per_s
    if v.traits.equal_shares:
        if v.in_reach is None:
            return "Shares were equal, and that suits these machines."
        return (
            f'Shares were equal. With shares that follow speed (pace="{v.in_reach.pace}") about '
            f"{number(v.in_reach.samples_per_s)} samples/s are in reach, {times(reach)} times as fast."
        )
    if abs(gain - 1) < BALANCED:
        return "Equal shares would have run as fast."
    if gain < 1:
        return f"Equal shares would have run at {number(f.equal)} samples/s, {percent(1 / gain - 1)} faster."
    slower = f"{times(gain)} times slower" if gain >= UNLIKE else f"{percent(1 - 1 / gain)} slower"
    return f"Equal shares would have run at {number(f.equal)} samples/s, {slower}."


def _who(v: Verdict) -> str:
    busy = [worker for worker in v.figures.workers if worker.samples]
    if len(v.figures.workers) < 2 or not busy:
        return ""
    idle = _idle(v)
    culprit = next((w for w in busy if w.worker == v.held_back_by), None)
    if culprit is not None:
        return f"{_held_back(v, culprit, busy)}{idle}"
    if v.figures.waiting > BALANCED:
        turns = f"they took turns at being last, and waited {percent(v.figures.waiting)} of the time"
        return f"No single worker held the fleet back: {turns}.{_anybody(v)}{idle}"
    longest = percent(max(worker.waiting for worker in busy))
    slowest, fastest = min(busy, key=lambda w: w.speed), max(busy, key=lambda w: w.speed)
    if slowest.speed > 0 and fastest.speed / slowest.speed > UNLIKE:
        share = percent(slowest.share)
        return (
            f"{capital(v.name(slowest))} is the slowest{' at work' if idle else ''}: it did {share} of the work, "
            f"and nobody waited more than {longest} of the time.{idle}"
        )
    return f"Nobody held the fleet back: shares are balanced, and nobody waited more than {longest} of the time.{idle}"


def _held_back(v: Verdict, culprit: WorkerFigures, busy: Sequence[WorkerFigures]) -> str:
    others = "the other" if len(busy) == 2 else "the others"
    spent = f"and {others} spent {percent(culprit.blamed)} of the time waiting for it."
    if not v.traits.equal_shares and v.too_coarse(culprit):
        advice = " It does one or two micro-batches a step: a smaller micro_batch would let its share fit."
    elif v.traits.if_stalled and culprit.held:
        held = f"in {percent(culprit.held)} of the steps, each time for about {duration(culprit.held_s)}"
        return f"{capital(v.name(culprit))} held everybody up {held}, {spent}{_no_waiting(v, 'it')}"
    else:
        set_before = v.pace and not v.traits.equal_shares and not v.traits.follows_speed
        advice = f' pace="{DEFAULT}" would follow its speed step by step.' if set_before else ""
    here = "" if culprit.steps == v.figures.steps else " it was there for"
    often = f"every step{here}" if culprit.last == 1 else f"{percent(culprit.last)} of the steps{here}"
    return f"{capital(v.name(culprit))} held the fleet back: it was last in {often}, {spent}{advice}"


def unlike(figures: Figures) -> bool:
    """Whether the workers' speeds differ by more than a little."""
    speeds = [worker.speed for worker in figures.workers if worker.speed > 0]
    return len(speeds) > 1 and max(speeds) / min(speeds) > UNLIKE


def _not_worth(v: Verdict) -> str:
    """That a machine costs more than it brings: it is slow, and the round is longer with it."""
    worst = min(v.figures.workers, key=lambda worker: worker.adds, default=None)
    if worst is None or v.figures.steps < ENOUGH or not unlike(v.figures):
        return ""
    if worst.adds > -WORTH * v.figures.samples_per_s:
        return ""
    longer = f"without it about {number(-worst.adds)} samples/s more are in reach, for the round is longer with it"
    return f"{capital(v.name(worst))} seems to cost more than it brings: {longer}."


def few_micro_batches(worker: WorkerFigures) -> bool:
    """Whether it does one or two a step, so that its share cannot fit its speed."""
    return 0 < worker.micro_batches <= 2 * (worker.steps - worker.sat_out)


def _held_up(v: Verdict) -> bool:
    """Whether somebody, the same one or now this one and now that one, held the others up now and then."""
    culprit = next((w for w in v.figures.workers if w.worker == v.held_back_by), None)
    if culprit is not None:
        return culprit.held > 0 and not v.too_coarse(culprit)
    return v.figures.waiting > BALANCED and any(worker.held for worker in v.figures.workers)


def _anybody(v: Verdict) -> str:
    """How often somebody, now this one and now that one, held the others up."""
    held = sum(worker.held for worker in v.figures.workers)
    if not v.traits.if_stalled or not held:
        return ""
    each = sum(worker.held * worker.held_s for worker in v.figures.workers) / held
    said = f" In {percent(held)} of the steps one held the others up, each time for about {duration(each)}."
    return said + _no_waiting(v, "anybody")


def _no_waiting(v: Verdict, whom: str) -> str:
    """Shares that follow speed do not help against a machine whose speed nobody can foresee: a deadline does."""
    if v.in_reach is None:
        return ""
    best = number(v.in_reach.samples_per_s)
    return f' pace="{v.in_reach.pace}" does not wait for {whom}: up to {best} samples/s are in reach.'


def _idle(v: Verdict) -> str:
    idle = [worker for worker in v.figures.workers if not worker.samples and not worker.missed]
    if not idle:
        return ""
    who = capital(v.name(idle[0])) if len(idle) == 1 else f"{len(idle)} workers"
    return f" {who} sat out: too slow to help, or never dealt a share."


def _where(v: Verdict) -> str:
    """Where the time went, when the limit is far; and what to do about the parts that weigh."""
    f, said = v.figures, []
    if 0 < f.of_limit < 1 - NOTABLE and (f.waiting < NOTABLE or with_deadlines(f)):
        stuck = f"{percent(f.stuck)} stuck, " if f.stuck >= 0.005 else ""
        cut = f"{percent(f.cut)} work cut off, " if f.cut >= 0.005 else ""
        wait = f"{percent(f.waiting)} waiting, " if len(f.workers) > 1 else ""
        rest = f"{percent(f.round)} the round and {percent(f.rest)} the update and the rest"
        said.append(f"Of a step's time {percent(f.work)} was work, {stuck}{cut}{wait}{rest}.")
    if f.round > NOTABLE:
        cost = f"{percent(f.round)} of the time ({duration(f.round * f.seconds / f.steps)} a step)"
        said.append(f"The round took {cost}: a larger global_batch needs fewer of them.")
        said += [advice] if (advice := advice_text(f, v.rounds)) else []
    if v.outside > NOTABLE:
        between = "between steps (evaluation, saving, your own code)"
        said.append(f"Besides, {percent(v.outside)} of the run passed {between}.")
    return " ".join(said)


def _shortfall(v: Verdict) -> str:
    short = [worker for worker in v.figures.workers if worker.shortfall > 0.01]
    if not short:
        return ""
    worst = max(short, key=lambda worker: worker.shortfall)
    also = f" (and {len(short) - 1} more by less)" if len(short) > 1 else ""
    return (
        f"This host was too slow to play {v.name(worst)}: it ran {percent(worst.shortfall)} slower than "
        f"asked{also}. Raise --sample-ms or emulate fewer machines."
    )


def _skipped(v: Verdict) -> str:
    if not v.skipped_updates:
        return ""
    updates = "1 update was" if v.skipped_updates == 1 else f"{v.skipped_updates:,} updates were"
    return f"{updates} skipped (an overflow, or a step in which nothing was done)."


def steps_text(count: int) -> str:
    """``1 step``, ``12 steps``."""
    return f"{count:,} step" + ("" if count == 1 else "s")
