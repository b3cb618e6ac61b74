"""Advice for a fleet: the simplest of the fastest ways to train, which machines pay, and what failures leave.

The plan itself, as figures, sentences and a table, is here too.

Ways to train are compared without failures; then Paceline's goodput stands beside that of restarts from a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from paceline.observe.words.numbers import capital, duration, number, percent, percent_cell
from paceline.pace import DEFAULT
from paceline.simulate import goodput
from paceline.simulate.comparison import empty_table
from paceline.simulate.goodput import compare_goodput, fleet_mtbf_s, usual_costs
from paceline.simulate.network import seconds, size
from paceline.simulate.planning.choices import PERIOD_S, Choice, Player
from paceline.simulate.planning.fleet_spec import HOUR_S, FleetSpec, MachineKind, churn
from paceline.simulate.sites import Hop, RoundCost
from paceline.transport.formats import for_averages, for_gradients, planned

if TYPE_CHECKING:
    from rich.table import Table


AS_GOOD = 0.02
"""Part by which a simpler way may be slower and is still preferred."""
NEARLY = 0.1
"""Part by which an average with a shorter period may be slower and is still preferred."""
PAYS, WINS = 1.1, 2.0
"""Gains in samples per second from which on an average is mentioned, and from which on it is advised."""
USELESS = 0.01
"""Part of the speed below which a kind of machines is better left out."""


@dataclass(frozen=True)
class Worth:
    """The contribution of a kind of machines to the fleet."""

    kind: MachineKind
    brings: float | None
    """Part of the fleet's samples per second that would be missing without these machines.

    Below 0 they hold the others up. None: there are no others.
    """
    one_more: float
    """Gain from one more machine, as a part of the fleet's samples per second."""
    cheaper: float | None
    """Part by which a sample would be cheaper without these machines; None where no machine has a price."""


def best(choices: Sequence[Choice]) -> Choice:
    """Return the fastest choice with a round at every step, or a simpler one that is nearly as fast.

    float32 is simpler than other wire formats, and the default pace than others. The topology is the one that a run
    chooses.
    """
    exact = [one for one in choices if one.combine == "gradients" and one.found]
    fastest = max(one.samples_per_s for one in exact)
    near = [one for one in exact if one.samples_per_s >= (1 - AS_GOOD) * fastest]
    return min(near, key=lambda one: (one.comm_dtype != "float32", one.pace != DEFAULT, -one.samples_per_s))


def best_average(choices: Sequence[Choice]) -> Choice | None:
    """Return an average that is much faster than rounds at every step, if there is one.

    Among those that are nearly the fastest it has the shortest period, which differs least from rounds at every step.
    """
    averages = [one for one in choices if one.combine != "gradients" and one.found]
    fastest = max((one.samples_per_s for one in averages), default=0.0)
    if fastest < PAYS * best(choices).samples_per_s:
        return None
    near = [one for one in averages if one.samples_per_s >= (1 - NEARLY) * fastest]
    return min(near, key=lambda one: (one.period_s or 0.0, -one.samples_per_s))


def advised(choices: Sequence[Choice]) -> Choice:
    """Return the advised choice: rounds at every step, which are exact, unless an average is very much faster."""
    exact, average = best(choices), best_average(choices)
    wins = average is not None and average.samples_per_s >= WINS * exact.samples_per_s
    return average if average is not None and wins else exact


def cost_per_hour(fleet: FleetSpec) -> float:
    """Return the mean cost per hour of the machines that are present."""
    return sum(kind.count * kind.present * kind.cost_per_hour for kind in fleet.kinds)


def worth(fleet: FleetSpec, choice: Choice, *, steps: int | None = None, seed: int = 0) -> list[Worth]:
    """Return what each kind contributes under this choice; the fleet is played without it, and with one more of it."""

    def speed(changed: FleetSpec) -> float:
        player = Player(changed, steps=steps, seed=seed)
        return player.again(replace(choice, topology=player.found)).samples_per_s

    found, price = [], cost_per_hour(fleet) / choice.samples_per_s
    for kind in fleet.kinds:
        without = fleet.with_count(kind.name, 0)
        others = speed(without) if without.kinds else None
        more = fleet.with_count(kind.name, kind.count + 1)
        room = more.workers <= fleet.training.batch
        found.append(
            Worth(
                kind,
                brings=None if others is None else 1 - others / choice.samples_per_s,
                one_more=speed(more) / choice.samples_per_s - 1 if room else 0.0,
                cheaper=1 - cost_per_hour(without) / others / price if price and others else None,
            )
        )
    return found


def sentence(one: Worth) -> str:
    """Return what a kind is worth, as a sentence."""
    kind, plural = one.kind, one.kind.count > 1
    who = f"the {kind.count:,} {kind.name}" if plural else kind.name
    more = f"; one more would bring {_part(one.one_more)}"
    if one.brings is None:
        return capital(f"{who} {'are' if plural else 'is'} all there is{more}.")
    if one.brings < 0:
        held = f"{who} {'hold' if plural else 'holds'} the others up"
        return capital(f"{held}: leave {_them(plural)} out, and gain {_part(-one.brings)}.")
    gain = f"{who} {'bring' if plural else 'brings'} {_part(one.brings)}"
    if one.brings < USELESS:
        return capital(f"{gain}: leave {_them(plural)} out{_price(one)}.")
    return capital(f"{gain}{_price(one)}{more}.")


def _price(one: Worth) -> str:
    if one.cheaper is None or abs(one.cheaper) < 0.005:
        return ""
    return f", and a sample would cost {percent(abs(one.cheaper))} {'less' if one.cheaper > 0 else 'more'} without"


def _part(part: float) -> str:
    """Return a gain in words.

    >>> _part(0.0412), _part(0.123), _part(0.0001), _part(-0.02)
    ('4 %', '12 %', 'next to nothing', 'nothing')
    """
    if part <= 0:
        return "nothing"
    return "next to nothing" if part < 0.0005 else f"{100 * part:.1f} %" if part < 0.01 else percent(part)


def _them(plural: bool) -> str:
    return "them" if plural else "it"


def commands(fleet: FleetSpec, choice: Choice) -> list[str]:
    """Return the commands to type, for a roster and for a worker per machine, and the line to write for a period."""
    fewest = max(1, round(0.5 * fleet.workers))
    options = [f"--pace {choice.pace}"] if choice.pace and choice.pace != DEFAULT else []
    options += [f"--combine {choice.combine}"] if choice.combine != "gradients" else []
    options += [f"--comm-dtype {choice.comm_dtype}"] if choice.comm_dtype != "float32" else []
    if choice.period_s is None or choice.period_s == PERIOD_S:
        script_lines = []
    else:
        options.remove(f"--combine {choice.combine}")
        script_lines = [f"paceline.join(combine=paceline.Averaging(period_s={choice.period_s:g}))  # in train.py"]
    return [
        f"paceline host --host 0.0.0.0 --min {fewest} --max {fleet.workers}",
        " ".join(["paceline run --join HOST:PORT", *options, "train.py"]),
        *script_lines,
    ]


def gain_of(exact: Choice, average: Choice) -> str:
    """Return what an average would gain, and what that may cost, as a sentence."""
    gain = number(average.samples_per_s / exact.samples_per_s)
    wire = f" with comm_dtype {average.comm_dtype}" if average.comm_dtype != "float32" else ""
    return (
        f"{capital(average.name)}{wire} does {gain} times the samples per second: it pays unless it needs more than "
        f"{gain} times the samples for the same loss."
    )


@dataclass(frozen=True)
class FleetGoodput:
    """The goodput that failures leave of a fleet, as figures and in sentences."""

    figures: dict[str, Any]
    sentences: list[str]


def with_failures(fleet: FleetSpec, *, mtbf_h: float | None, replace_s: float | None) -> FleetSpec:
    """Return the fleet with a mean time between failures for machines that the file says nothing of."""
    if mtbf_h is None:
        if replace_s is not None:
            raise ValueError("--replace-s goes with --mtbf-h, a machine's mean hours between failures")
        return fleet
    if not mtbf_h > 0:
        raise ValueError(f"--mtbf-h is {mtbf_h:g}: hours, above 0")
    if replace_s is None or not (replace_s >= 0 and math.isfinite(replace_s)):
        raise ValueError("--mtbf-h needs --replace-s, the seconds until a machine that failed is replaced, at least 0")
    kinds = (
        kind if kind.reclaimed_per_hour else replace(kind, reclaimed_per_hour=1 / mtbf_h, away_s=replace_s)
        for kind in fleet.kinds
    )
    return replace(fleet, kinds=tuple(kinds))


def fleet_goodput(
    fleet: FleetSpec, chosen: Choice, *, seed: int = 0, known: Mapping[str, float] | None = None
) -> FleetGoodput | None:
    """Return the goodput of a fleet that trains as ``chosen``; None where no machine fails.

    ``known`` are costs that replace the usual ones. A newcomer's state takes as long as its slowest way, at least.
    """
    rates = fleet.column("reclaimed_per_hour") / HOUR_S
    if not rates.any():
        if known:
            raise ValueError("--costs are those of failures: give --mtbf-h, or reclaimed_per_hour in [[machines]]")
        return None
    mtbf_s = [1 / rate if rate else math.inf for rate in rates.tolist()]
    somebody_s, changes = fleet_mtbf_s(fleet.workers, mtbf_s), churn(fleet)
    step_s = fleet.training.batch / chosen.samples_per_s
    size = {"state_bytes": fleet.training.state_bytes, "fleet_mtbf_s": somebody_s}
    join_s = max(changes.coming_s, usual_costs(fleet.workers, **size).join_s)
    costs = usual_costs(fleet.workers, **size, **{"step_s": step_s, "join_s": join_s, **(known or {})})
    away_s, speeds = fleet.column("away_s").tolist(), fleet.column("speed").tolist()
    found = compare_goodput(speeds, costs, mtbf_s=mtbf_s, replace_s=away_s, seed=seed)
    sentences = goodput.verdict(found, costs, fleet_mtbf_s=somebody_s)
    return FleetGoodput(goodput.figures(found, costs), sentences)


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
    samples, price = fleet.training.samples, cost_per_hour(fleet)
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
    exact, average = best(found), best_average(found)
    wire = f", comm_dtype {exact.comm_dtype}" if exact.comm_dtype != "float32" else ""
    sentences = [
        f"With a round at every step, pace {exact.pace}{wire}: {number(exact.samples_per_s)} samples/s, "
        f"{percent_cell(exact.over_limit)} of the limit; a round {_way(found)}takes {seconds(exact.round_s)}, "
        f"{percent_cell(exact.in_rounds)} of the time{_busiest(fleet, player, exact)}."
    ]
    if average is not None:
        sentences.append(gain_of(exact, average))
    if fleet.training.samples:
        sentences.append(_time_and_cost(fleet, exact, average))
    if fits := memory(fleet):
        sentences.append(fits)
    under = " (with the average)" if advised(found) is not exact else ""
    if worth:
        sentences.append(f"What machines bring{under}:")
    return [*sentences, *(f"  {sentence(one)}" for one in worth)]


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
    samples, price = fleet.training.samples or 0.0, cost_per_hour(fleet)

    def words(one: Choice) -> str:
        money = f" and cost {number(one.hours(samples) * price)}" if price else ""
        return f"{duration(HOUR_S * one.hours(samples))}{money}"

    other = f"; with the average {words(average)}" if average is not None else ""
    return f"{number(samples)} samples take {words(chosen)}{other}."
