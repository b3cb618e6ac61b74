"""The file ``fleet.toml``; whatever is wrong raises one line with its position and what to write.

`Tables` and `FileTable` keep the line of each value for these errors.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.machines.link import Link, parse_link
from paceline.simulate.network import UNITS, model_bytes, size
from paceline.simulate.planning.fleet_spec import OPTIMISERS, FleetSpec, MachineKind, TrainedModel
from paceline.simulate.planning.measured import Measured
from paceline.simulate.sites import Sites

DEFAULT_SITE = "here"
BANDWIDTH, LATENCY_MS = "10gbit", 0.1
"""Default bandwidth and latency of a site."""
MOST_WORKERS = 100_000
FASTEST_BITS = 1e12
"""Upper bound of a cable's bandwidth, for measured rounds that took next to no time."""


def read_fleet(path: Path, measured: Measured | None = None) -> FleetSpec:
    """Return the fleet that a file describes; what the file leaves out is taken from ``measured``, a run's log."""
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text)
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text file: a fleet is described in TOML") from None
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    return _fleet(Tables(str(path), text, values), measured)


def _fleet(tables: Tables, measured: Measured | None) -> FleetSpec:
    tables.only("model", "job", "sites", "links", "machines")
    model = tables.one("model")
    training = _training(model, tables.one("job", needed=False), measured)
    sites = _sites(tables, training, measured)
    entries = tables.many("machines")
    kinds = tuple(_kind(entry, sites, training) for entry in entries) or _workers_of_run(sites, measured)
    if not kinds:
        raise tables.wrong("there are no [[machines]]: describe at least one kind, or give --from RUN")
    if measured is not None:
        kinds = _filled(tables, entries, kinds, training, measured)
    fleet = FleetSpec(kinds, sites, training)
    _check(tables, model, entries, fleet)
    return fleet


def _check(tables: Tables, model: FileTable, entries: list[FileTable], fleet: FleetSpec) -> None:
    names = [kind.name for kind in fleet.kinds]
    for number, entry in enumerate(entries):
        if names[number] in names[:number]:
            raise entry.wrong("name", f"{names[number]!r} is taken: give each kind of machine its own")
        if "speed" not in entry and not fleet.kinds[number].speed > 0:
            raise entry.wrong("", "[[machines]] does not say speed: times the reference machine's, or --from RUN")
    if fleet.workers > MOST_WORKERS:
        raise tables.wrong(f"{fleet.workers:,} machines: at most {MOST_WORKERS:,} can be planned for")
    if fleet.training.batch < fleet.workers:
        raise model.wrong(
            "batch", f"is {fleet.training.batch}, less than a sample for each of {fleet.workers} machines"
        )
    used = list(dict.fromkeys(fleet.order))
    for site in used[1:]:
        try:
            fleet.sites.route(used[0], site)
        except ValueError as error:
            raise tables.wrong(f"{error}: describe one in [[links]], between = [{used[0]!r}, {site!r}]") from None


def _training(model: FileTable, job: FileTable, measured: Measured | None) -> TrainedModel:
    data = _size(model, measured)
    optimiser = model.text("optimizer", "adam").lower()
    if optimiser not in OPTIMISERS:
        raise model.wrong("optimizer", f"is {optimiser!r}; there are {', '.join(OPTIMISERS)}")
    sample_ms = model.number("sample_ms", 1000 * min(measured.sample_s) if measured else 0.0, above=0)
    if not sample_ms:
        raise model.wrong(
            "", "[model] does not say sample_ms: the reference machine's time for a sample, or --from RUN"
        )
    batch = model.whole("batch", measured.batch if measured else None)
    model.done()
    samples = float(job.whole("samples", 1)) if "samples" in job else None
    job.done()
    return TrainedModel(data, batch, sample_ms / 1000, optimiser, samples)


def _size(model: FileTable, measured: Measured | None) -> int:
    parameters, megabytes = model.get("parameters"), model.get("megabytes")
    if parameters is None and megabytes is None and measured is not None and measured.model_bytes:
        return measured.model_bytes
    try:
        return model_bytes(str(parameters) if parameters is not None else None, megabytes)
    except (ValueError, TypeError):
        key = "parameters" if parameters is not None else "megabytes" if megabytes is not None else "model"
        raise model.wrong(key, 'gives no size: write parameters = "25M" or megabytes = 100, one of them') from None


def _sites(tables: Tables, training: TrainedModel, measured: Measured | None) -> Sites:
    cables: dict[str, Link] = {}
    for entry in tables.many("sites"):
        name = entry.text("name", None)
        if name in cables:
            raise entry.wrong("name", f"{name!r} is taken: give each site its own")
        cables[name] = _link(entry, BANDWIDTH, LATENCY_MS)
        entry.done()
    cables = cables or {DEFAULT_SITE: _cable_of_run(training, measured)}
    links: dict[frozenset[str], Link] = {}
    for entry in tables.many("links"):
        ends = _ends(entry, cables)
        if ends in links:
            raise entry.wrong("between", f"{' and '.join(sorted(ends))} have a link already")
        links[ends] = _link(entry, None, None)
        entry.done()
    return Sites(cables, links)


def _ends(entry: FileTable, sites: dict[str, Link]) -> frozenset[str]:
    named = entry.get("between")
    if not isinstance(named, list) or len(named) != 2 or named[0] == named[1]:
        raise entry.wrong("between", 'names no two sites: write between = ["office", "cloud"]')
    for name in named:
        if name not in sites:
            raise entry.wrong("between", f"names {name!r}, which is no site; there are {', '.join(sites)}")
    return frozenset(named)


def _link(entry: FileTable, bandwidth: str | None, latency_ms: float | None) -> Link:
    wide = entry.text("bandwidth", bandwidth)
    if latency_ms is None and "latency_ms" not in entry:
        raise entry.wrong("", f"{entry.called} does not say latency_ms: one way")
    delay_ms = entry.number("latency_ms", latency_ms or 0.0, least=0)
    try:
        return parse_link(f"{wide},{delay_ms:.9f}ms")
    except ValueError:
        raise entry.wrong("bandwidth", f"is {wide!r}: write 100mbit, 1gbit or 500kbit, above 0") from None


def _kind(entry: FileTable, sites: Sites, training: TrainedModel) -> MachineKind:
    only = next(iter(sites.cables)) if len(sites.cables) == 1 else None
    name, site = entry.text("name", None), entry.text("site", only)
    if site not in sites.cables:
        raise entry.wrong("site", f"is {site!r}, which is no site; there are {', '.join(sites.cables)}")
    default = MachineKind(name, site)
    numbers = {
        key: entry.number(key, getattr(default, key), least=0)
        for key in ("jitter", "stalls_per_hour", "stall_s", "reclaimed_per_hour", "away_s", "cost_per_hour")
    }
    speed = entry.number("speed", 0.0)
    if "speed" in entry and not speed > 0:
        raise entry.wrong("speed", f"of {name!r} is {speed:g}: it is times the reference machine's, above 0")
    memory = entry.number("memory_gb", 0.0, above=0) * 1e9 if "memory_gb" in entry else None
    kind = MachineKind(name, site, entry.whole("count", 1), speed, memory_bytes=memory, **numbers)
    if memory is not None and memory < training.needed_bytes:
        raise entry.wrong(
            "memory_gb",
            f"of {name!r} is {memory / 1e9:g}, too small for the model: parameters, gradients and the state of "
            f"{training.optimiser} need {size(training.needed_bytes)}",
        )
    entry.done()
    return kind


# -- from a run --------------------------------------------------------------------------------------------------------


def _cable_of_run(training: TrainedModel, measured: Measured | None) -> Link:
    """Return a cable on which rounds of ``2 (n - 1) / n * B`` bytes take as long as the run's, or the default."""
    usual = parse_link(f"{BANDWIDTH},{LATENCY_MS}ms")
    workers = len(measured.sample_s) if measured is not None else 1
    if measured is None or workers < 2:
        return usual
    delays_s = 2 * (workers - 1) * usual.delay_s
    bits = 8 * 2 * (workers - 1) / workers * training.model_bytes
    return Link(min(FASTEST_BITS, bits / max(measured.round_s - delays_s, 1e-6)), usual.delay_s)


def _workers_of_run(sites: Sites, measured: Measured | None) -> tuple[MachineKind, ...]:
    site = next(iter(sites.cables))
    many = len(measured.sample_s) if measured is not None else 0
    return tuple(MachineKind(f"worker {number}", site, speed=0.0) for number in range(many))


def _filled(
    tables: Tables, entries: list[FileTable], kinds: tuple[MachineKind, ...], training: TrainedModel, measured: Measured
) -> tuple[MachineKind, ...]:
    """Return kinds with the figures that the file leaves out, taken from the run's workers in rank order."""
    if sum(kind.count for kind in kinds) != len(measured.sample_s):
        if any(not kind.speed for kind in kinds):
            raise tables.wrong(
                f"machines without a speed: --from has {len(measured.sample_s)} workers and this file "
                f"{sum(kind.count for kind in kinds)} machines, so that they cannot be matched"
            )
        return kinds
    made, first = [], 0
    for number, kind in enumerate(kinds):
        given = entries[number] if entries else ()
        found = measured.kind_figures(range(first, first + kind.count), training.sample_s)
        made.append(replace(kind, **{key: value for key, value in found.items() if key not in given}))
        first += kind.count
    return tuple(made)


HEAD = re.compile(r"\s*\[\[?\s*([A-Za-z0-9_.\"-]+)\s*\]\]?")
KEY = re.compile(r"\s*\"?([A-Za-z0-9_-]+)\"?\s*=")
COUNT = re.compile(r"\s*(\d{1,15}(?:\.\d*)?)\s*([kmgb]?)\s*", re.ASCII)

EntryKey = tuple[str, int, str]
"""A table's name, its number among those of that name, and a key in it; an empty key is the table's head."""


def line_numbers(text: str) -> dict[EntryKey, int]:
    r"""Return the line of every table's head and of every key, as far as they stand on lines of their own.

    >>> line_numbers('[model]\nbatch = 8\n[[machines]]\n[[machines]]\nspeed = 1')["machines", 1, "speed"]
    5
    """
    found: dict[EntryKey, int] = {}
    seen: Counter[str] = Counter()
    table, number = "", 0
    for line, words in enumerate(text.splitlines(), start=1):
        if head := HEAD.match(words):
            table = head[1].strip('"')
            number, seen[table] = seen[table], seen[table] + 1
            found[table, number, ""] = line
        elif key := KEY.match(words):
            found.setdefault((table, number, key[1]), line)
    return found


class FileTable:
    """One table of the file: values are read by name, and keys that were never read are refused."""

    def __init__(self, tables: Tables, name: str, number: int, values: Mapping[str, Any]) -> None:
        self._tables, self._name, self._number, self._values = tables, name, number, values
        self._asked: list[str] = []

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def wrong(self, key: str, text: str) -> ValueError:
        """Return the error for a value: ``fleet.toml, line 12: speed is 0, ...``."""
        return self._tables.wrong(f"{key} {text}" if key else text, self._line(key))

    def _line(self, key: str) -> int | None:
        lines, name, number = self._tables.lines, self._name, self._number
        return lines.get((name, number, key)) or lines.get((name, number, ""))

    def get(self, key: str) -> Any:
        self._asked.append(key)
        return self._values.get(key)

    def number(self, key: str, default: float, *, above: float | None = None, least: float | None = None) -> float:
        value = self.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.wrong(key, f"is {value!r}, and should be a number")
        if above is not None and not value > above:
            raise self.wrong(key, f"is {value:g}, and must be above {above:g}")
        if least is not None and not value >= least:
            raise self.wrong(key, f"is {value:g}, and must be at least {least:g}")
        return float(value)

    def whole(self, key: str, default: int | None) -> int:
        """Return a whole number from 1; the file may have it as text, such as ``"50M"``."""
        value = self.get(key)
        if value is None:
            if default is None:
                raise self.wrong("", f"{self.called} does not say {key}")
            return default
        many = value if isinstance(value, int) and not isinstance(value, bool) else count(value)
        if many < 1:
            raise self.wrong(key, f'is {value!r}, and should be a whole number from 1, such as 512 or "50M"')
        return many

    def text(self, key: str, default: str | None) -> str:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise self.wrong("", f"{self.called} does not say {key}")
        if not isinstance(value, str) or not value.strip():
            raise self.wrong(key, f"is {value!r}, and should be a text")
        return value.strip()

    @property
    def called(self) -> str:
        """The table's name as the file writes it."""
        return f"[{self._name}]" if self._name in ("model", "job") else f"[[{self._name}]]"

    def done(self) -> None:
        """Raise an error for a key that was never read."""
        for key in self._values:
            if key not in self._asked:
                raise self.wrong(key, f"is not known in {self.called}{_meant(key, self._asked)}")


class Tables:
    """All tables of a file."""

    def __init__(self, file: str, text: str, values: Mapping[str, Any]) -> None:
        self.file, self.lines, self._values = file, line_numbers(text), values

    def wrong(self, text: str, line: int | None = None) -> ValueError:
        return ValueError(f"{self.file}{f', line {line}' if line else ''}: {text}")

    def only(self, *names: str) -> None:
        for name in self._values:
            if name not in names:
                line = self.lines.get((name, 0, "")) or self.lines.get(("", 0, name))
                raise self.wrong(f"{name} is not known{_meant(name, names)}", line)

    def one(self, name: str, *, needed: bool = True) -> FileTable:
        values = self._values.get(name)
        if values is None and needed:
            raise self.wrong(f"there is no [{name}]: it has the model's size, the batch and a sample's time")
        if values is not None and not isinstance(values, dict):
            raise self.wrong(f"{name} is a table: write [{name}]", self.lines.get((name, 0, "")))
        return FileTable(self, name, 0, values or {})

    def many(self, name: str) -> list[FileTable]:
        values = self._values.get(name, [])
        if not isinstance(values, list) or not all(isinstance(one, dict) for one in values):
            raise self.wrong(f"{name} are tables, one for each: write [[{name}]]", self.lines.get((name, 0, "")))
        return [FileTable(self, name, number, one) for number, one in enumerate(values)]


def _meant(key: str, known: Any) -> str:
    near = difflib.get_close_matches(key, list(known), n=1)
    return f": did you mean {near[0]}?" if near else f"; there are {', '.join(dict.fromkeys(known))}"


def count(value: object) -> int:
    found = COUNT.fullmatch(value.lower()) if isinstance(value, str) else None
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return round(float(found[1]) * UNITS[found[2]]) if found else 0
