"""Runs a program of habits (habits.py) in a fleet of two and in one process, and says how it ended.

There are two good ends. *Right*: all workers end well with replicas that are equal bit for bit, and equal to one
process's to rounding (on the same batches, where deadlines or a kill have cut them); the ledger and the library's audit
both say that every sample counted as often as it should.
*Refused*: every worker ends with one of Paceline's own errors. Everything else is an AssertionError.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from crew import Crew, Outcome
from flock import Flock
from habits import Habits, may_refuse, must_refuse, same_shuffle, script

from paceline.feed.ranges import Ranges
from paceline.observe import RunLog, read_log
from paceline.observe.analysis.audit import audit

TOLERANCE = 1e-9
"""Relative: shares that follow the clock add the same numbers up in other orders."""

Ledger = list[list[float]]
"""By epoch and sample: how often its gradient was applied."""


@dataclass(frozen=True)
class Verdict:
    """A good end."""

    refused: str = ""
    """What the first worker said; empty when everything was right."""
    loaded: bool = False
    """Whether a second run went on from a checkpoint."""


def judge(habits: Habits, folder: Path) -> Verdict:
    """Run it, and raise AssertionError with the whole story when it had no good end."""
    text = script(habits)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.py").write_text(text)
    try:
        verdict = _judge(habits, folder)
        why = must_refuse(habits, loads=verdict.loaded)
        assert verdict.refused or not why, f"it must be refused, and was not: {why}"
        expected = not verdict.refused or may_refuse(habits, loads=verdict.loaded)
        assert expected, f"nothing in it should be refused: {verdict.refused}"
    except AssertionError as error:
        raise AssertionError(f"{habits or 'plain'}\n{text}\n{folder}\n{error}") from None
    return verdict


def _judge(habits: Habits, folder: Path) -> Verdict:
    with ExitStack() as stack:
        alone = stack.enter_context(_crew(habits, folder / "one", 1))
        first = _in_elastic_fleet(habits, folder / "two") if habits.elastic else _in_fleet(habits, folder / "two")
        single = alone.wait()[0]
    if said := refusal(first):
        return Verdict(said)
    if said := refusal([single]):  # a schedule in the micro-batches' loop shows only where there are several of them
        return Verdict(said)
    _right(habits, folder, [folder / "two"], first, single.value)
    checkpoint = folder / "two" / "saved.pt"
    if not habits.loads or not checkpoint.exists():
        return Verdict()
    second = _in_fleet(habits, folder / "again", load=checkpoint)
    if said := refusal(second):
        return Verdict(said, loaded=True)
    _right(habits, folder, [folder / "two", folder / "again"], second, single.value)
    return Verdict(loaded=True)


# -- running ---------------------------------------------------------------------------------------------------------


def _crew(habits: Habits, folder: Path, workers: int, load: Path | None = None) -> Crew:
    folder.mkdir()
    (folder / "hurry").touch()
    pace = "equal" if workers == 1 else habits.pace
    env = {"QUICK_EXIT": "1", "PACELINE_PACE": pace}
    args = [str(folder / "saved.pt"), str(load or "")]
    return Crew(str(folder.parent / "train.py"), workers, folder, args=args, env=env)


def _in_fleet(habits: Habits, folder: Path, load: Path | None = None) -> list[Outcome]:
    with _crew(habits, folder, 2, load) as crew:
        return crew.wait()


def _in_elastic_fleet(habits: Habits, folder: Path) -> list[Outcome]:
    """One of two is killed and comes back, unless all have ended before."""
    args = [str(folder / "saved.pt"), ""]
    with Flock(str(folder.parent / "train.py"), 2, folder, args=args, env={"PACELINE_PACE": "equal"}) as fleet:
        if _until(fleet, lambda: _last(fleet)["step"] >= habits.killed_at):
            fleet.kill(1)
            _until(fleet, lambda: len(_last(fleet)["workers"]) == 1)
            if not _return(fleet):
                return [fleet.outcome(0)]
        ended = fleet.hurry()
        late = ended[1].code == 75 and "the run has ended" in ended[1].err  # it came when nothing was left to do
        return [ended[0]] if late else list(ended.values())


def _return(fleet: Flock) -> bool:
    """The killed worker comes back, and again where it asks for that, as a launcher would; whether it is in."""
    for _ in range(10):
        fleet.start(1)
        ended = lambda: fleet.workers[1].poll() is not None  # noqa: E731
        if not _until(fleet, lambda ended=ended: len(_last(fleet)["workers"]) == 2 or ended()):
            return False
        if not ended() or "start it again" not in fleet.said(1):
            return True
    raise AssertionError(f"it could not come back: {fleet.complaints()}")


def _until(fleet: Flock, happened: Callable[[], bool], *, within: float = 60.0) -> bool:
    """False when the worker that nobody kills has ended before."""
    until = time.monotonic() + within
    while not happened():
        assert time.monotonic() < until, fleet.complaints()
        if fleet.workers[0].poll() is not None:
            return False
        time.sleep(0.02)
    return True


def _last(fleet: Flock) -> dict[str, Any]:
    records = fleet.records()
    return records[-1] if records else {"step": -1, "workers": [None, None]}


# -- judging ---------------------------------------------------------------------------------------------------------


def refusal(ended: list[Outcome]) -> str:
    """What the workers said, when all of them ended with an error of Paceline's own; empty when all ended well."""
    if all(one.code == 0 for one in ended):
        return ""
    codes = [one.code for one in ended]
    named = [text for one in ended if one.code and "belongs in fleet.state" in (text := _sentence(one.err))]
    if named:  # where workers come and go, those who did not make the call train on without the one that is told
        return named[0]
    assert all(codes), f"some were refused and some not: {codes}\n{_told(ended)}"
    sentences = [_sentence(one.err) for one in ended]
    assert all(sentences), f"an error that is not Paceline's own:\n{_told(ended)}"
    reasons = [text for text in sentences if not re.search(r"lost|broke|left with", text)]
    assert reasons, f"nobody says why:\n{_told(ended)}"
    return reasons[0]


def _told(ended: list[Outcome]) -> str:
    return "\n".join(f"-- worker {number} ({one.code}):\n{one.err[-3000:]}" for number, one in enumerate(ended))


def _sentence(err: str) -> str:
    """The error that a worker ended with, if Paceline raised it."""
    lines = [line for line in err.splitlines() if line.strip()]
    while lines and lines[-1].startswith("warning: the run ended"):  # the log's last, by a script without `with`
        lines.pop()
    last = lines[-1] if lines else ""
    if last.startswith("paceline: "):
        return last.removeprefix("paceline: ")
    places = [line for line in lines if line.startswith('  File "')]
    ours = bool(places) and "/paceline/" in places[-1]
    found = re.match(r"(?:paceline\.errors\.\w+|ValueError|TypeError): (.+)", last)
    return found[1] if found and ours else ""


def _right(habits: Habits, folder: Path, runs: list[Path], ended: list[Outcome], single: dict[str, Any]) -> None:
    """Raise AssertionError when something is wrong."""
    values = [one.value for one in ended]
    assert all(value == values[0] for value in values), f"replicas are not equal: {[v['rate'] for v in values]}"
    log = joined([read_log(run / "run") for run in runs])
    ledger: Ledger = values[0]["counted"]
    ledger_and_audit_agree(log, ledger)
    if len(runs) > 1 and not same_shuffle(habits):
        return
    if habits.pace in ("auto", "joint", "elastic") and batches(log) != batches(read_log(folder / "one" / "run")):
        single = replayed(folder, f"replayed {len(runs)}", log)
    for name in ("counted", "weights", "rate"):
        off = _apart(values[0][name], single[name])
        assert off < TOLERANCE, f"{name} differ from one process's by {off}: {values[0]['rate']} {single['rate']}"


REPLAY = """
import json
from pathlib import Path
import paceline.feed.dealing
import paceline.training.join
from paceline.feed.ranges import Ranges, positions
from paceline.pace import Pacer
from paceline.records import Plan

batches = json.loads(Path(__file__).with_suffix(".json").read_text())

class Recorded(Pacer):
    name = "recorded"
    def check(self, workers):
        pass
    observe = load_state_dict = check
    def state_dict(self):
        return {}
    def plan(self, ask):
        batch = batches[ask.step] if ask.step < len(batches) else [0, [[0, ask.total]]]
        return Plan(generation=ask.generation, step=ask.step, samples=(sum(stop - start for start, stop in batch[1]),))

dealt = iter(batches)

def deal(self, samples):
    epoch, ranges = next(dealt)
    feed = self._feed
    left = set(positions(feed._pool.ranges).tolist()) - {p for start, stop in ranges for p in range(start, stop)}
    assert feed.epoch == epoch, (feed.epoch, epoch)
    feed._pool, feed._queues = Ranges((p, p + 1) for p in sorted(left)), [Ranges(sorted(map(tuple, ranges)))]
    return (feed._queues[0].total,)

paceline.feed.dealing.SampleDealing.deal = deal
paceline.training.join.make_pacer = lambda pace: Recorded()
"""
"""What makes one process train on the batches of a log, step by step, instead of its own."""


def batches(log: RunLog) -> list[list[Any]]:
    """Of each step: its epoch, and the positions it counted, as ranges in order."""
    spans = [Ranges(sorted(piece for mine in record.ranges for piece in mine)).ranges for record in log.records]
    return [[record.epoch, [list(piece) for piece in ranges]] for record, ranges in zip(log.records, spans)]


def replayed(folder: Path, name: str, log: RunLog) -> dict[str, Any]:
    """What one process has at the end when its steps have the samples that the log's steps had."""
    assert [record.step for record in log.records] == list(range(len(log.records)))
    (folder / f"{name}.json").write_text(json.dumps(batches(log)))
    (folder / f"{name}.py").write_text(REPLAY + (folder / "train.py").read_text())
    run = folder / name
    run.mkdir()
    (run / "hurry").touch()
    with Crew(str(folder / f"{name}.py"), 1, run, args=[str(run / "saved.pt"), ""], env={"QUICK_EXIT": "1"}) as crew:
        ended = crew.wait()[0]
    assert ended.code == 0, f"the replay ended with {ended.code}: {ended.err[-3000:]}"
    return dict(ended.value)


def joined(logs: list[RunLog]) -> RunLog:
    """One log of a run and of the one that went on from its checkpoint."""
    last = logs[-1]
    first = last.records[0].step if last.records else logs[0].records[-1].step + 1
    before = [record for record in logs[0].records if record.step < first] if len(logs) > 1 else []
    # The first loop of the second run goes on with one of the first run's.
    loops = [loop for loop in logs[0].loops if _start(loop) <= first or len(logs) == 1]
    loops += [loop for loop in last.loops if _start(loop) > first and len(logs) > 1]
    records = (*before, *last.records)
    return replace(last, records=records, times=(0.0,) * len(records), loops=tuple(loops))


def _start(loop: Mapping[str, Any]) -> int:
    return int(loop.get("first_step") or 0)


def ledger_and_audit_agree(log: RunLog, ledger: Ledger) -> None:
    """What was applied, by the ledger, is what the records say, epoch by epoch; and each counted what it should."""
    epochs = audit(log)
    applied = [row for row in ledger if any(row)]
    told = all(loop.get("dealt") for loop in log.loops)  # of a sampler's draws the log does not tell how many there are
    assert all(epoch.sound and (epoch.whole or not told) for epoch in epochs), f"the audit: {epochs}"
    said, booked = [epoch.counted for epoch in epochs], [sum(row) for row in applied]
    assert len(said) == len(booked), f"the audit has {said} samples, the ledger {booked}"
    assert _apart(said, booked) < 1e-6, f"the audit has {said} samples, the ledger {booked}"


def _apart(one: Any, other: Any) -> float:
    """The largest difference of two numbers or nested lists of them, relative where they are large."""
    if isinstance(one, list):
        assert len(one) == len(other), (len(one), len(other))
        return max((_apart(a, b) for a, b in zip(one, other, strict=True)), default=0.0)
    off = abs(one - other) / max(1.0, abs(other))
    return off if off == off else float("inf")
