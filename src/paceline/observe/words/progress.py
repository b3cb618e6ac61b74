"""A run while it goes on, in words: what it is, where it stands, and events worth a line of their own."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from paceline.observe.analysis.figures import Figures
from paceline.observe.analysis.membership import parse_generation
from paceline.observe.analysis.progress import ProgressSnapshot
from paceline.observe.words.membership import change_text
from paceline.observe.words.numbers import duration, number, percent, rounds_behind, size
from paceline.observe.words.pace_changes import parse_switch

MOST_SHARES = 16


def run_line(event: Mapping[str, Any]) -> str:
    """``digits: 4 workers, pace adaptive, combine gradients, gloo``."""
    workers = event.get("workers")
    count = len(workers) if isinstance(workers, (list, tuple)) else 0
    said = [f"{count} worker{'' if count == 1 else 's'}"] if count else []
    said += [f"{key} {event[key]}" for key in ("pace", "combine") if event.get(key)]
    said += [str(event["backend"])] if event.get("backend") else []
    return f"{event.get('name') or 'run'}: {', '.join(said)}"


def run_words(run: Mapping[str, Any], figures: Figures) -> tuple[str, str]:
    """The run's name, and ``3 to 5 workers, pace adaptive, combine gradients, gloo``."""
    name = str(run.get("name") or "run")
    details = run_line(run).removeprefix(f"{name}: ")
    if figures.fewest != figures.most:
        details = re.sub(r"^\d+ workers?\b", f"{size(figures.fewest, figures.most)} workers", details)
    return name, details


def step_line(now: ProgressSnapshot) -> str:
    """``step 40/113  epoch 2/3  1,204 samples/s (93 % of limit)  shares 93 93 47 23  loss 0.412  12 s left``.

    With deadlines also ``121 of 128 samples  deadline 106 ms  worker 2 late, 3 rounds behind``.
    """
    limit = f" ({percent(now.of_limit)} of limit)" if now.limit else ""
    here = now.present
    more = f" and {len(here) - MOST_SHARES} more" if len(here) > MOST_SHARES else ""
    said = [*place_texts(now), f"{number(now.samples_per_s)} samples/s{limit}"]
    said.append("shares " + " ".join(str(row.samples) for row in here[:MOST_SHARES]) + more)
    said += [count_text(now), deadline_text(now), late_text(now), loss_text(now), left_text(now)]
    return "  ".join(filter(None, said))


def now_line(now: ProgressSnapshot) -> str:
    """``step 40/113 · epoch 2/3 · 1,204 samples/s · 93 % of the limit · loss 0.412 · 12 s left``."""
    if now.step is None:
        return "waiting for the first step"
    limit = f"{percent(now.of_limit)} of the limit" if now.limit else ""
    said = [*place_texts(now), f"{number(now.samples_per_s)} samples/s", limit, loss_text(now)]
    return " · ".join(filter(None, [*said, left_text(now) if now.left_s else ""]))


def late_text(now: ProgressSnapshot) -> str:
    """Who is late; of many, how many and who is furthest behind."""
    if not now.late:
        return ""
    worst = max(now.late, key=lambda row: row.behind)
    if len(now.late) == 1:
        return f"worker {worst.worker} {worst.mark}"
    furthest = f" (worker {worst.worker}: {rounds_behind(worst.behind)})" if worst.behind else ""
    return f"{len(now.late)} workers late{furthest}"


def describe(event: Mapping[str, Any]) -> tuple[str, str] | None:
    """An event worth a line of its own, as (level, text); None for those that only move the figures.

    Levels are ``info``, ``news`` (who left, who joined, how the pace changed), ``warning`` and whatever a note says.
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
    """What is described, with its level where that is worth a word."""
    return text if level in ("info", "news") else f"{level}: {text}"


def place_texts(snapshot: ProgressSnapshot) -> list[str]:
    """``step 40/113`` and ``epoch 2/3``, or ``step 40`` when the whole is not known."""
    places = {"step": (snapshot.step, snapshot.steps), "epoch": (snapshot.epoch, snapshot.epochs)}
    return [f"{name} {part}" + ("" if whole is None else f"/{whole}") for name, (part, whole) in places.items()]


def loss_text(snapshot: ProgressSnapshot) -> str:
    """``loss 0.412``, or nothing."""
    return "" if snapshot.loss is None else f"loss {snapshot.loss:.3g}"


def left_text(snapshot: ProgressSnapshot) -> str:
    """``12 s left``, or nothing."""
    return "" if snapshot.left_s is None else f"{duration(math.ceil(snapshot.left_s))} left"


def count_text(snapshot: ProgressSnapshot) -> str:
    """``121 of 128 samples in the step``: the newest step's count against the batch. Nothing without deadlines: then
    the two are the same."""
    batch = "" if snapshot.global_batch is None else f" of {snapshot.global_batch:,}"
    return f"{snapshot.count:,}{batch} samples in the step" if snapshot.deadlines else ""


def deadline_text(snapshot: ProgressSnapshot) -> str:
    """``deadline 106 ms``, or nothing."""
    seconds = snapshot.deadline_s
    return "" if seconds is None or not math.isfinite(seconds) else f"deadline {duration(seconds)}"


def _figure(value: Any) -> str:
    return number(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)
