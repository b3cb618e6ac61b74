"""The closing verdict: how fast, how far from the limit, who held the fleet back, and what to change.

Its sentences, and the table of the workers that the page and the terminal show beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from paceline.observe.analysis.audit import audit, audit_verdict
from paceline.observe.analysis.figures import Figures, WorkerFigures, own_speeds, summarise
from paceline.observe.analysis.generations import Move, moves, moves_text
from paceline.observe.analysis.round_cost import Rounds, advice_text, precision_text, rounds_of
from paceline.observe.log.reader import RunLog
from paceline.observe.words.deadlines import SAME, Switch, deadline_sentences, switches, switches_text, with_deadlines
from paceline.observe.words.numbers import (
    capital,
    duration,
    machines,
    number,
    percent,
    percent_cell,
    signed,
    size,
    times,
    worker_name,
)
from paceline.pace import DEFAULT, WAITING, Traits, traits_of
from paceline.records import StepRecord

WARM_UP = 5
"""Steps left out at the start, at most a quarter of all: caches are cold and shares not found yet."""
BALANCED = 0.05
"""Part of the time below which waiting is not mentioned."""
UNLIKE = 1.25
"""Ratio of the fastest worker's speed to the slowest's from which machines count as unlike."""
NOTABLE = 0.10
"""Part of the time from which something is worth a sentence."""
ENOUGH = 20
"""Steps after which a round's time is known well enough to judge that a machine is not worth it."""
WORTH = 0.02
"""Part of the fleet's speed that a worker must cost to be worth a sentence: a round's time is no more exact."""
MOST_NAMED = 8
"""Workers whose sizes are listed one by one."""


@dataclass(frozen=True)
class Reach:
    """Another pace that the figures speak for, and the samples per second that it may reach."""

    pace: str
    samples_per_s: float


@dataclass(frozen=True)
class Verdict:
    """The numbers of a run and, as `text`, what they mean."""

    figures: Figures
    """Figures after warm-up; `paceline.observe.analysis.figures` has the formulas."""
    warm_up: int = 0
    """Steps left out at the start."""
    pace: str = ""
    machines: Mapping[int, str] = field(default_factory=dict)
    skipped_updates: int = 0
    """Steps of the whole run whose update was not applied."""
    outside: float = 0.0
    """Part of the time from the first step to the last that passed between steps (evaluation, own code)."""
    moves: Sequence[Move] = ()
    """Changes of membership in the whole run, in order."""
    switches: Sequence[Switch] = ()
    """Steps at which the pace began and ended deadlines, in order."""
    audit: str = ""
    """Sentence on whether every sample of an elastic run counted once; empty for another run."""
    rounds: Rounds | None = None
    """Bytes and wire of the rounds; None when they are not in the log."""
    sizes: Mapping[int, FoundSize] = field(default_factory=dict)
    """Sizes that ``micro_batch="auto"`` found, by worker; empty where the size was given."""

    @property
    def traits(self) -> Traits:
        """Return the traits of the run's pace."""
        return traits_of(self.pace)

    def name(self, worker: WorkerFigures) -> str:
        """Return a worker's name in the middle of a sentence."""
        return worker_name(worker.worker, self.machines.get(worker.worker))

    def too_coarse(self, worker: WorkerFigures) -> bool:
        """Return whether a smaller micro_batch would help: one or two per step, of a size that was given."""
        return few_micro_batches(worker) and not self.sizes

    @property
    def over_equal(self) -> float:
        """Return the ratio of the speed to that of equal shares; 0 when not known."""
        return self.figures.samples_per_s / self.figures.equal if self.figures.equal > 0 else 0.0

    @property
    def too_short(self) -> bool:
        """Return whether there are warm-up steps only, which are no ground for advice."""
        return not self.warm_up

    @cached_property
    def held_back_by(self) -> int | None:
        """Return the worker behind most of the waiting; None when there is no such worker.

        There is none when shares are balanced, workers took turns, a deadline spared them the wait, or the run was too
        short to tell.
        """
        if self.too_short or with_deadlines(self.figures):
            return None
        culprit = max(self.figures.workers, key=lambda w: w.blamed, default=None)
        blame = sum(w.blamed for w in self.figures.workers)
        named = culprit is not None and blame > BALANCED and culprit.blamed > blame / 2
        return culprit.worker if culprit is not None and named else None

    @cached_property
    def in_reach(self) -> Reach | None:
        """Return the pace that `text` advises; None when it advises none."""
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
        """Return a few plain sentences, one subject per line."""
        return "\n".join(_sentences(self))

    def to_json(self) -> dict[str, Any]:
        """Return all numbers and the text as plain JSON types."""
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

    ``whole``: the log holds all records of the run, so that an elastic run can be audited.
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
    """Return the part of the time that passed between steps.

    A step is stamped at its end, so the span from the first stamp to the last holds all steps but the first.
    """
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
        few = [_speed(v), _only_warm_up(v), switches_text(v.switches), sizes_text(v.sizes), _skipped(v)]
        few += [moves_text(v.moves), v.audit]
        return [sentence for sentence in few if sentence]
    if with_deadlines(v.figures):
        middle = [*deadline_sentences(v.figures, v.pace, v.name), _idle(v).strip()]
    else:
        middle = [_equal_shares(v), _who(v), _not_worth(v)]
    more = [_where(v), precision_text(v.rounds), sizes_text(v.sizes), _shortfall(v), _skipped(v)]
    more += [moves_text(v.moves), v.audit]
    sentences = [_speed(v), switches_text(v.switches), *middle, *more]
    return [sentence for sentence in sentences if sentence]


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
        advice = " It does one or two micro-batches per step: a smaller micro_batch would let its share fit."
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
    """Return whether the workers' speeds differ by more than a little."""
    speeds = [worker.speed for worker in figures.workers if worker.speed > 0]
    return len(speeds) > 1 and max(speeds) / min(speeds) > UNLIKE


def _not_worth(v: Verdict) -> str:
    """Return a sentence on a machine that costs more than it brings: it is slow, and the round is longer with it."""
    worst = min(v.figures.workers, key=lambda worker: worker.adds, default=None)
    if worst is None or v.figures.steps < ENOUGH or not unlike(v.figures):
        return ""
    if worst.adds > -WORTH * v.figures.samples_per_s:
        return ""
    longer = f"without it about {number(-worst.adds)} samples/s more are in reach, for the round is longer with it"
    return f"{capital(v.name(worst))} seems to cost more than it brings: {longer}."


def few_micro_batches(worker: WorkerFigures) -> bool:
    """Return whether a worker does one or two micro-batches per step, so that its share cannot fit its speed."""
    return 0 < worker.micro_batches <= 2 * (worker.steps - worker.sat_out)


def _held_up(v: Verdict) -> bool:
    """Return whether a worker, always the same one or different ones, held the others up in some steps."""
    culprit = next((w for w in v.figures.workers if w.worker == v.held_back_by), None)
    if culprit is not None:
        return culprit.held > 0 and not v.too_coarse(culprit)
    return v.figures.waiting > BALANCED and any(worker.held for worker in v.figures.workers)


def _anybody(v: Verdict) -> str:
    """Return how often some worker, not always the same, held the others up."""
    held = sum(worker.held for worker in v.figures.workers)
    if not v.traits.if_stalled or not held:
        return ""
    each = sum(worker.held * worker.held_s for worker in v.figures.workers) / held
    often = f" In {percent(held)} of the steps one held the others up, each time for about {duration(each)}."
    return often + _no_waiting(v, "anybody")


def _no_waiting(v: Verdict, whom: str) -> str:
    """Return advice for a machine whose speed nobody can foresee: a deadline helps, shares do not."""
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
    """Return where the time went, when the limit is far, and what to do about the large parts."""
    f, sentences = v.figures, []
    if 0 < f.of_limit < 1 - NOTABLE and (f.waiting < NOTABLE or with_deadlines(f)):
        stuck = f"{percent(f.stuck)} stuck, " if f.stuck >= 0.005 else ""
        cut = f"{percent(f.cut)} work cut off, " if f.cut >= 0.005 else ""
        wait = f"{percent(f.waiting)} waiting, " if len(f.workers) > 1 else ""
        rest = f"{percent(f.round)} the round and {percent(f.rest)} the update and the rest"
        sentences.append(f"Of a step's time {percent(f.work)} was work, {stuck}{cut}{wait}{rest}.")
    if f.round > NOTABLE:
        cost = f"{percent(f.round)} of the time ({duration(f.round * f.seconds / f.steps)} per step)"
        sentences.append(f"The round took {cost}: a larger global_batch needs fewer of them.")
        sentences += [advice] if (advice := advice_text(f, v.rounds)) else []
    if v.outside > NOTABLE:
        between = "between steps (evaluation, saving, your own code)"
        sentences.append(f"Besides, {percent(v.outside)} of the run passed {between}.")
    return " ".join(sentences)


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
    """Return ``1 step``, ``12 steps``."""
    return f"{count:,} step" + ("" if count == 1 else "s")


class FoundSize(NamedTuple):
    """The size of one worker's micro-batches."""

    samples: int
    by_memory: bool
    """Whether memory, not speed, bounds the size."""


def found_sizes(records: Iterable[StepRecord]) -> dict[int, FoundSize]:
    """Return the last size of each worker that has found one, by identity."""
    found = {}
    for record in records:
        for worker, samples, bound in zip(record.workers, record.micro_size, record.memory_bound):
            if samples:
                found[worker] = FoundSize(samples, bool(bound))
    return dict(sorted(found.items()))


def sizes_text(found: Mapping[int, FoundSize]) -> str:
    """Return the sizes in one line.

    >>> sizes_text({0: FoundSize(32, False), 1: FoundSize(8, True)})
    'Micro-batches: worker 0 32, worker 1 8 (memory).'
    >>> sizes_text({worker: FoundSize(8 * (1 + worker % 2), worker == 3) for worker in range(20)})
    'Micro-batches: 8 to 16 samples; on 1 of 20 workers, as many as memory holds.'
    """
    if not found:
        return ""
    if len(found) <= MOST_NAMED:
        each = (f"worker {one} {own.samples}{' (memory)' if own.by_memory else ''}" for one, own in found.items())
        return f"Micro-batches: {', '.join(each)}."
    samples, bound = [own.samples for own in found.values()], sum(own.by_memory for own in found.values())
    memory = f"; on {bound} of {len(found)} workers, as many as memory holds" if bound else ""
    return f"Micro-batches: {size(min(samples), max(samples))} samples{memory}."


Cell = Callable[[WorkerFigures], str]


@dataclass(frozen=True)
class WorkerTable:
    """The workers as a table, the same for the page and the terminal."""

    names: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 2
    """Number of columns that hold words, the first ones; the others hold figures."""

    def without(self, left_out: Sequence[str]) -> WorkerTable:
        kept = [column for column, name in enumerate(self.names) if name not in left_out]
        rows = (tuple(row[column] for column in kept) for row in self.rows)
        return WorkerTable(tuple(self.names[column] for column in kept), tuple(rows), self.words)


def worker_table(judged: Verdict) -> WorkerTable:
    """Return the workers with all columns that have values; for a run without steps, the workers of its start."""
    workers = judged.figures.workers
    columns: dict[str, Cell] = {
        "worker": lambda w: str(w.worker),
        "machine": lambda w: judged.machines.get(w.worker, ""),
    }
    columns |= {name: cell for name, cell, shown in COLUMNS if workers and shown(judged.figures)}
    rows = workers or tuple(WorkerFigures(worker) for worker in sorted(judged.machines))
    return WorkerTable(tuple(columns), tuple(tuple(cell(row) for cell in columns.values()) for row in rows))


COLUMNS: tuple[tuple[str, Cell, Callable[[Figures], bool]], ...] = (
    ("samples", lambda w: f"{w.samples:,}", lambda f: True),
    ("share", lambda w: percent_cell(w.share), lambda f: True),
    ("samples/s", lambda w: number(w.speed), lambda f: True),
    # Whether a machine is worth having; where all are alike, each is worth its part.
    ("adds", lambda w: signed(w.adds), lambda f: unlike(f) and not with_deadlines(f)),
    ("waiting", lambda w: percent_cell(w.waiting), lambda f: True),
    # Which worker was waited for; with deadlines none is, and some miss the round.
    ("last in", lambda w: percent_cell(w.last), lambda f: not with_deadlines(f)),
    ("waited for", lambda w: percent_cell(w.blamed), lambda f: not with_deadlines(f)),
    ("missed", lambda w: f"{w.missed:,}", lambda f: f.deadlines > 0),
    ("stuck", lambda w: percent_cell(w.stuck), lambda f: any(w.stuck for w in f.workers)),
    ("cut off", lambda w: percent_cell(w.cut), lambda f: any(w.cut for w in f.workers)),
    ("sat out", lambda w: f"{w.sat_out:,}", lambda f: any(w.sat_out for w in f.workers)),
    ("steps", lambda w: f"{w.steps:,}", lambda f: any(w.steps < f.steps for w in f.workers)),
)
"""Name, cell, and whether a run has something to show there."""
