"""Sentences about the computers and sites that a run's workers were on, and how their sums travelled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paceline.observe.log import sanitise
from paceline.observe.words.numbers import duration

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
