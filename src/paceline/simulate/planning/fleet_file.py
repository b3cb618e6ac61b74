"""Reading ``fleet.toml``; whatever is wrong is one line that says where it stands and what to write."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

from paceline.machines.link import Link, parse_link
from paceline.simulate.network_table import model_bytes, size
from paceline.simulate.planning.fleet_spec import OPTIMISERS, FleetSpec, MachineKind, TrainedModel
from paceline.simulate.planning.measured import Measured
from paceline.simulate.planning.tables import FileTable, Tables
from paceline.simulate.sites import Sites

DEFAULT_SITE = "here"
BANDWIDTH, LATENCY_MS = "10gbit", 0.1
"""Of a site where the file says none."""
MOST_WORKERS = 100_000
FASTEST_BITS = 1e12
"""A measured round that took next to nothing makes no faster cable than this."""


def read_fleet(path: Path, measured: Measured | None = None) -> FleetSpec:
    """The fleet that a file describes. What it leaves out is taken from ``measured``, a run's log."""
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
    """The default, or one on which the run's rounds take what they took: ``2 (n - 1) / n * B`` bytes each."""
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
    """Kinds with the figures that the file leaves out, of as many of the run's workers, in rank order."""
    if sum(kind.count for kind in kinds) != len(measured.sample_s):
        if any(not kind.speed for kind in kinds):
            raise tables.wrong(
                f"machines without a speed: --from has {len(measured.sample_s)} workers and this file "
                f"{sum(kind.count for kind in kinds)} machines, so that they cannot be matched"
            )
        return kinds
    made, first = [], 0
    for number, kind in enumerate(kinds):
        said = entries[number] if entries else ()
        found = measured.of(range(first, first + kind.count), training.sample_s)
        made.append(replace(kind, **{key: value for key, value in found.items() if key not in said}))
        first += kind.count
    return tuple(made)
