"""One-line texts about a run: what it is, where it stands, events worth a line of their own, and where its workers are.

`places_text` describes the computers and sites that the workers were on, and how their sums travelled.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paceline.observe.analysis.figures import Figures
from paceline.observe.analysis.generations import change_text, parse_generation
from paceline.observe.analysis.progress import ProgressSnapshot
from paceline.observe.log import sanitise
from paceline.observe.words.deadlines import parse_switch
from paceline.observe.words.numbers import duration, number, percent, rounds_behind, size

MOST_SHARES = 16


def run_line(event: Mapping[str, Any]) -> str:
    """Return ``digits: 4 workers, pace adaptive, combine gradients, gloo``."""
    workers = event.get("workers")
    count = len(workers) if isinstance(workers, (list, tuple)) else 0
    facts = [f"{count} worker{'' if count == 1 else 's'}"] if count else []
    facts += [f"{key} {event[key]}" for key in ("pace", "combine") if event.get(key)]
    facts += [str(event["backend"])] if event.get("backend") else []
    return f"{event.get('name') or 'run'}: {', '.join(facts)}"


def run_words(run: Mapping[str, Any], figures: Figures) -> tuple[str, str]:
    """Return the run's name, and ``3 to 5 workers, pace adaptive, combine gradients, gloo``."""
    name = str(run.get("name") or "run")
    details = run_line(run).removeprefix(f"{name}: ")
    if figures.fewest != figures.most:
        details = re.sub(r"^\d+ workers?\b", f"{size(figures.fewest, figures.most)} workers", details)
    return name, details


def step_line(now: ProgressSnapshot) -> str:
    """Return ``step 40/113  epoch 2/3  1,204 samples/s (93 % of limit)  shares 93 93 47 23  loss 0.412  12 s left``.

    A run with deadlines also has ``121 of 128 samples  deadline 106 ms  worker 2 late, 3 rounds behind``.
    """
    limit = f" ({percent(now.of_limit)} of limit)" if now.limit else ""
    here = now.present
    more = f" and {len(here) - MOST_SHARES} more" if len(here) > MOST_SHARES else ""
    facts = [*place_texts(now), f"{number(now.samples_per_s)} samples/s{limit}"]
    facts.append("shares " + " ".join(str(row.samples) for row in here[:MOST_SHARES]) + more)
    facts += [count_text(now), deadline_text(now), late_text(now), loss_text(now), left_text(now)]
    return "  ".join(filter(None, facts))


def now_line(now: ProgressSnapshot) -> str:
    """Return ``step 40/113 · epoch 2/3 · 1,204 samples/s · 93 % of the limit · loss 0.412 · 12 s left``."""
    if now.step is None:
        return "waiting for the first step"
    limit = f"{percent(now.of_limit)} of the limit" if now.limit else ""
    facts = [*place_texts(now), f"{number(now.samples_per_s)} samples/s", limit, loss_text(now)]
    return " · ".join(filter(None, [*facts, left_text(now) if now.left_s else ""]))


def late_text(now: ProgressSnapshot) -> str:
    """Return who is late, or how many are and who is furthest behind."""
    if not now.late:
        return ""
    worst = max(now.late, key=lambda row: row.behind)
    if len(now.late) == 1:
        return f"worker {worst.worker} {worst.mark}"
    furthest = f" (worker {worst.worker}: {rounds_behind(worst.behind)})" if worst.behind else ""
    return f"{len(now.late)} workers late{furthest}"


def describe(event: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return an event worth a line of its own as (level, text); None for one that only changes the figures.

    Levels are ``info``, ``news`` (who left, who joined, how the pace changed), ``warning``, and the level of a note.
    """
    kind = event.get("event")
    if kind == "note":
        return str(event.get("level") or "info"), str(event.get("text") or "")
    if kind == "evaluate":
        result = event.get("result")
        figures = [f"{key} {_figure(value)}" for key, value in result.items()] if isinstance(result, Mapping) else []
        return "info", f"evaluated after step {event.get('step')}: {', '.join(figures)}"
    if kind == "generation":
        change = parse_generation(event)
        moved = change is not None and change.number > 1 and (change.left or change.joined)
        return ("news", change_text(change)) if change is not None and moved else None
    if kind == "pace":
        switch = parse_switch(event)
        return None if switch is None else ("news", switch.text)
    if kind == "save":
        if event.get("automatic"):  # every minute or so: no news
            return None
        return "info", f"saved step {event.get('step')} to {event.get('path')}"
    if kind == "load":
        return "info", f"loaded step {event.get('step')} from {event.get('path')}"
    if kind == "end" and event.get("reason") != "finished":
        text = str(event.get("text") or "")
        return "warning", f"the run ended ({event.get('reason')})" + (f": {text}" if text else "")
    return None


def line_of(level: str, text: str) -> str:
    """Return a described event as a line, with its level unless that is ``info`` or ``news``."""
    return text if level in ("info", "news") else f"{level}: {text}"


def place_texts(snapshot: ProgressSnapshot) -> list[str]:
    """Return ``step 40/113`` and ``epoch 2/3``, or ``step 40`` when their number is not known."""
    counts = {"step": (snapshot.step, snapshot.steps), "epoch": (snapshot.epoch, snapshot.epochs)}
    return [f"{name} {now}" + ("" if last is None else f"/{last}") for name, (now, last) in counts.items()]


def loss_text(snapshot: ProgressSnapshot) -> str:
    """Return ``loss 0.412``, or nothing."""
    return "" if snapshot.loss is None else f"loss {snapshot.loss:.3g}"


def left_text(snapshot: ProgressSnapshot) -> str:
    """Return ``12 s left``, or nothing."""
    return "" if snapshot.left_s is None else f"{duration(math.ceil(snapshot.left_s))} left"


def count_text(snapshot: ProgressSnapshot) -> str:
    """Return ``121 of 128 samples in the step``: the newest step's count and the batch.

    Empty for a run without deadlines, where the two are equal.
    """
    batch = "" if snapshot.global_batch is None else f" of {snapshot.global_batch:,}"
    return f"{snapshot.count:,}{batch} samples in the step" if snapshot.deadlines else ""


def deadline_text(snapshot: ProgressSnapshot) -> str:
    """Return ``deadline 106 ms``, or nothing."""
    seconds = snapshot.deadline_s
    return "" if seconds is None or not math.isfinite(seconds) else f"deadline {duration(seconds)}"


def _figure(value: Any) -> str:
    return number(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)


MOST_NAMED = 8
"""Sites or computers that are listed one by one."""


def last_places(run: Mapping[str, Any], others: Iterable[Mapping[str, Any]] = ()) -> Mapping[str, Any] | None:
    """Return the last ``places`` of a log; None when all workers were on one computer, or it is not known."""
    events = [run, *(event for event in others if event.get("event") == "generation")]
    places = events[-1].get("places")
    return places if isinstance(places, Mapping) else None


def places_text(places: Mapping[str, Any] | None) -> str:
    """Return ``2 sites, 41 ms and 82 Mbit/s apart: workers 0 1 2 3 | 4 5 6 7; sums cross once, by workers 0 and 4``.

    Empty for one computer. ``places`` comes from a log, and may be anything.
    """
    sites = _sites(places)
    if places is None or not sites:
        return ""
    what = f"{len(sites)} sites" if len(sites) > 1 else f"{len(sites[0])} computers"
    apart = [text for text in (_round_trip(places), _speed(places)) if text]
    groups = [[worker for computer in site for worker in computer] for site in sites] if len(sites) > 1 else sites[0]
    listed = " | ".join(_workers(group) for group in groups[:MOST_NAMED])
    more = f" and {len(groups) - MOST_NAMED} more" if len(groups) > MOST_NAMED else ""
    head = what + (f", {' and '.join(apart)} apart" if apart else "") + f": workers {listed}{more}"
    if not places.get("tree"):
        return f"{head}; sums go round them in this order"
    return f"{head}; sums cross once, by workers {_workers([group[0] for group in groups])}"


def _sites(places: Mapping[str, Any] | None) -> list[list[list[Any]]]:
    found: Any = places.get("sites") if places is not None else None
    sites = [[list(c) for c in site if _filled(c)] for site in found if _filled(site)] if _filled(found) else []
    sites = [site for site in sites if site]
    return sites if sum(map(len, sites)) > 1 else []


def _filled(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value)


def _workers(group: Sequence[Any]) -> str:
    named = " ".join(str(worker) for worker in group[: 2 * MOST_NAMED])
    return named + (f" and {len(group) - 2 * MOST_NAMED} more" if len(group) > 2 * MOST_NAMED else "")


def _round_trip(places: Mapping[str, Any]) -> str:
    seconds = _positive(places.get("round_trip_s"))
    return duration(seconds) if seconds else ""


def _speed(places: Mapping[str, Any]) -> str:
    """Return the speed of the link.

    >>> _speed({"bits_s": 81.7e6}), _speed({"bits_s": 2.04e9}), _speed({})
    ('82 Mbit/s', '2.0 Gbit/s', '')
    """
    bits = _positive(places.get("bits_s"))
    return "" if not bits else f"{bits / 1e9:.1f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.0f} Mbit/s"


def _positive(value: Any) -> float:
    return max(0.0, float(value)) if sanitise.is_number(value) else 0.0
