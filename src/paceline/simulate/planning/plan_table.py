"""A plan as figures, sentences and a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from paceline.observe.words.numbers import duration, number, percent, percent_cell
from paceline.simulate.comparison_table import empty_table
from paceline.simulate.network_table import seconds, size
from paceline.simulate.planning import advice
from paceline.simulate.planning.advice import Worth
from paceline.simulate.planning.choices import Choice, Player
from paceline.simulate.planning.fleet_spec import HOUR_S, FleetSpec
from paceline.simulate.sites import Hop, RoundCost
from paceline.transport.formats import for_averages, for_gradients, planned

if TYPE_CHECKING:
    from rich.table import Table

NOT_MODELLED = (
    "Not modelled: convergence, rounds that overlap with backward, lost packets. Averages and deadlines may need more "
    "samples for the same loss; a comm_dtype of fewer bits is exact to its precision."
)


def wire_columns() -> list[tuple[str, list[str]]]:
    """Return the columns of the table, and the wires in each: averages have their own where gradients have others.

    >>> wire_columns()
    [('float32', ['float32']), ('bf16 (int8)', ['bf16', 'int8'])]
    """
    (plain, *gradients), (_, *averages) = planned(for_gradients()), planned(for_averages())
    pairs = [[*gradients[at : at + 1], *averages[at : at + 1]] for at in range(max(len(gradients), len(averages)))]
    titles = [" ".join(f"({name})" if name in averages else name for name in names) for names in pairs]
    return [(plain, [plain]), *zip(titles, pairs, strict=True)]


def figures(fleet: FleetSpec, found: Sequence[Choice]) -> list[dict[str, Any]]:
    """Return one dictionary per choice."""
    samples, price = fleet.training.samples, advice.cost_per_hour(fleet)
    return [
        {
            **asdict(one),
            "over_limit": one.over_limit,
            "hours": one.hours(samples) if samples else None,
            "cost": one.hours(samples) * price if samples and price else None,
        }
        for one in found
    ]


def table(found: Sequence[Choice]) -> Table:
    """Return samples per second and their part of the limit as a table.

    It has one row per pace and average, and columns for wire format and topology.
    """
    shapes = list(dict.fromkeys(one.topology for one in found))
    several = [f"\n{'one ring' if shape == 'ring' else shape}" if len(shapes) > 1 else "" for shape in shapes]
    titles = [f"{title}{shape}" for title, _ in wire_columns() for shape in several]
    drawn = empty_table(["samples/s,\npart of the limit"], titles)
    for name in dict.fromkeys(one.name for one in found):
        row = [one for one in found if one.name == name]
        cells = [_cell(row, wires, shape) for _, wires in wire_columns() for shape in shapes]
        drawn.add_row(name, *cells)
    return drawn


def _cell(row: Sequence[Choice], wires: Sequence[str], shape: str) -> str:
    one = next((one for one in row if one.comm_dtype in wires and one.topology == shape), None)
    return "-" if one is None else f"{number(one.samples_per_s)} {percent_cell(one.over_limit):>4}"


def head(fleet: FleetSpec, player: Player) -> list[str]:
    """Return the lines that describe the fleet."""
    training, sites = fleet.training, len(set(fleet.order))
    where = f"{sites} sites" if sites > 1 else "one site"
    lines = [
        f"{fleet.workers:,} machine{'s' if fleet.workers > 1 else ''} in {where}, {size(training.model_bytes)} of "
        f"parameters, batch {training.batch:,}: together at most {number(player.limit_per_s)} samples/s"
    ]
    if player.churn.changes_per_s:
        every_s = 1 / player.churn.changes_per_s
        lines.append(
            f"One comes or goes every {seconds(every_s)}: {percent(player.churn.present)} of the speed is there at a "
            f"time, and {percent(1 - 1 / (1 + player.churn.paused))} of the time goes into pauses"
        )
    return lines


def memory(fleet: FleetSpec) -> str:
    """Return a sentence on the memory that is left, where memory is given; machines that are too small were refused."""
    known = [kind for kind in fleet.kinds if kind.memory_bytes is not None]
    if not known:
        return ""
    training = fleet.training
    least = min(known, key=lambda kind: kind.memory_bytes or 0.0)
    state = training.needed_bytes - 2 * training.model_bytes
    return (
        f"The model fits: {size(training.model_bytes)} of parameters, as much of gradients and {size(state)} of "
        f"{training.optimiser}'s state leave {size((least.memory_bytes or 0) - training.needed_bytes)} for activations "
        f"on {least.name}."
    )


def verdict(fleet: FleetSpec, found: Sequence[Choice], worth: Sequence[Worth], player: Player) -> list[str]:
    """Return what the figures mean, in sentences."""
    exact, average = advice.best(found), advice.best_average(found)
    wire = f", comm_dtype {exact.comm_dtype}" if exact.comm_dtype != "float32" else ""
    sentences = [
        f"With a round at every step, pace {exact.pace}{wire}: {number(exact.samples_per_s)} samples/s, "
        f"{percent_cell(exact.over_limit)} of the limit; a round {_way(found)}takes {seconds(exact.round_s)}, "
        f"{percent_cell(exact.in_rounds)} of the time{_busiest(fleet, player, exact)}."
    ]
    if average is not None:
        sentences.append(advice.gain_of(exact, average))
    if fleet.training.samples:
        sentences.append(_time_and_cost(fleet, exact, average))
    if fits := memory(fleet):
        sentences.append(fits)
    under = " (with the average)" if advice.advised(found) is not exact else ""
    if worth:
        sentences.append(f"What machines bring{under}:")
    return [*sentences, *(f"  {advice.sentence(one)}" for one in worth)]


def _way(found: Sequence[Choice]) -> str:
    """Return the topology that a run chooses, in words, where there are several."""
    several = len({one.topology for one in found}) > 1
    return f"over {next(one.topology for one in found if one.found)}, which a run finds by itself, " if several else ""


def meets(against: Mapping[str, Any]) -> str:
    """Return a sentence on how far the plan is from the run that it was filled in from."""
    planned, real = against["planned_samples_per_s"], against["real_samples_per_s"]
    return f"The run did {number(real)} samples/s; by the plan it should have done {number(planned)}."


def _busiest(fleet: FleetSpec, player: Player, chosen: Choice) -> str:
    cost: RoundCost = player.network(chosen.comm_dtype, chosen.topology).gradients
    if not cost.link_bytes:
        return ""

    def taken_s(hop: Hop) -> float:
        return cost.link_bytes[hop] / fleet.sites.link(hop).bits_per_s

    hop = max(sorted(cost.link_bytes), key=taken_s)
    return f", with {size(cost.link_bytes[hop])} from {hop[0]} to {hop[1]}"


def _time_and_cost(fleet: FleetSpec, chosen: Choice, average: Choice | None) -> str:
    samples, price = fleet.training.samples or 0.0, advice.cost_per_hour(fleet)

    def words(one: Choice) -> str:
        money = f" and cost {number(one.hours(samples) * price)}" if price else ""
        return f"{duration(HOUR_S * one.hours(samples))}{money}"

    other = f"; with the average {words(average)}" if average is not None else ""
    return f"{number(samples)} samples take {words(chosen)}{other}."
